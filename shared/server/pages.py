"""``/``: the playground and its charts, served from local files. Introduced in phase 4.

Invariant: the page sends requests only to this server; its Content-Security-Policy enforces that.
"""

from functools import cache
from pathlib import Path

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.responses import Response

FOLDER = Path(__file__).parent / "page"
TRACING = Path(__file__).parents[1] / "tracing/page"
SHARED = (TRACING / "theme.css", TRACING / "elements.js", *TRACING.glob("pool*"))
"""Files shared with the pages of runs."""
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
router = APIRouter(include_in_schema=False)


@router.get("/")
async def index() -> Response:
    return _response("index.html")


@router.get("/page/{name}")
async def part(name: str) -> Response:
    if name not in _files():
        raise HTTPException(404)
    return _response(name)


@cache
def _files() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (*FOLDER.iterdir(), *SHARED) if path.suffix in TYPES}


def _response(name: str) -> Response:
    headers = {
        "Content-Security-Policy": POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Response(_files()[name], headers=headers, media_type=f"{TYPES[Path(name).suffix]}; charset=utf-8")

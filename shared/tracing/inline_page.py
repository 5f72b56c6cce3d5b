"""One HTML file made from a template, its style, its script and its data, all inline. Introduced in phase 4.

Invariant: the page's policy (CSP) allows only this style and this script, by their hashes, and no network request. So a
page opens from a file, and text in it from a model or a user can do nothing.
"""

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

REGION = re.compile(r"\{\{(\w+)\}\}")


def filled(template: Path, *, style: str, script: str, **regions: str) -> str:
    """The template with its regions ``{{name}}``; ``regions`` are HTML."""
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; img-src data:"
    found = {"policy": f"{policy}; base-uri 'none'; form-action 'none'", "style": style, "script": script, **regions}
    return REGION.sub(lambda region: found[region[1]], _part(template))


def joined(paths: Iterable[Path]) -> str:
    """The texts of the files, in order."""
    return "\n\n".join(map(_part, paths))


def embedded(data: dict[str, Any]) -> str:
    """JSON that is safe inside a script element."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def packed(data: dict[str, Any]) -> str:
    """Compressed JSON, for large data that repeats itself."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


@cache
def _part(path: Path) -> str:
    return path.read_text(encoding="utf-8").strip("\n")

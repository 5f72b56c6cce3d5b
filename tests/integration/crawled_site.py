"""A site of HTML files, served over loopback and crawled by a real Chromium."""

import functools
import http.server
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote, urljoin

from tests.integration.tabs import complaints_of, opened

LOOK = """() => {
    const all = (selector, read) => [...document.querySelectorAll(selector)].map(read);
    return {
        ids: all('[id]', element => element.id),
        links: all('a[href]', link => link.href),
        complaints: [...document.images].filter(image => !image.naturalWidth).map(image => `picture: ${image.src}`),
        headings: all('h2', heading => heading.firstChild.textContent),
        modules: all('h2 ~ ul a.name, section > ul a.name', link => link.textContent),
        changes: all('.file-diff pre .line:not(summary)', line => line.textContent),
        course: [...document.querySelector('.sidebar-tree ul')?.querySelectorAll('a') ?? []].map(link => link.href),
        measured: all('#measured a', link => link.getAttribute('href')),
        charts: all('article img', image => image.src.split('/').pop()),
    };
}"""
Visit = SimpleNamespace
"""What was found on one page: ``ids`` and ``links``, and, where the browser opened it, the other parts of LOOK and the
browser's complaints."""


def crawl(browser: Any, folder: Path, origin: str) -> dict[str, Visit]:
    """Every page that links lead to from ``index.html``, by its address without the origin.

    Of pages of the same make, such as the source files of a language, one is opened.
    """
    visits: dict[str, Visit] = {}
    makes: set[str] = set()
    waiting = ["index.html"]
    with opened(browser, "about:blank", "") as tab:
        complaints = complaints_of(tab, f"{origin}/")
        while waiting:
            name = waiting.pop()
            if name in visits or (make := make_of(name)) in makes:
                continue
            makes |= {make} if make else set()
            complaints.clear()
            tab.goto(f"{origin}/{name}", wait_until="load")
            visits[name] = visit = Visit(**tab.evaluate(LOOK))
            visit.complaints += complaints
            waiting += sorted(target for target in targets(visit, origin) if (folder / target).is_file())
    return visits


def read(url: str, html: str) -> Visit:
    """A page's anchors and links, without a browser."""
    links = map(unescape, dict.fromkeys(re.findall(r'<a\b[^>]*\bhref="?((?<=")[^"]*|[^"\s>]*)', html)))
    folder = url[: url.rindex("/") + 1]
    resolved = [url + link if not link or link[0] in "#?" else _joined(folder, link) for link in links]
    return Visit(ids=re.findall(r'<\w[^<>]*?\bid="?((?<=")[^"]*|[^"\s>]*)', html), links=resolved)


_joined = functools.cache(urljoin)  # the links beside a page are those of its neighbours


def make_of(name: str) -> str:
    """What many pages have in common with this one: a source file's suffix, a report's benchmark; empty for others."""
    path = Path(name.removesuffix(".html"))
    if path.parts[0] == "source":
        return path.suffix or "folder"
    if path.parts[0] == "steps":
        return "steps"
    return path.name.partition("-")[0] if path.parts[0] == "benchmarks" else ""


def targets(visit: Visit, origin: str) -> set[str]:
    """The pages of the site that a page leads to."""
    pages = {
        unquote(link.partition("#")[0].removeprefix(f"{origin}/")) for link in visit.links if link.startswith(origin)
    }
    return {page for page in pages if page.endswith(".html")}


def broken_links(visits: dict[str, Visit], folder: Path, origin: str) -> list[str]:
    """The links of crawled pages that lead to no file of the site, or to no anchor of the page."""
    broken = []
    anchors = {name: set(visit.ids) for name, visit in visits.items()}
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}

    @functools.cache
    def leads_somewhere(link: str) -> bool:
        if not link.startswith(origin):
            return re.match(r"https?:|mailto:", link) is not None
        url, _, anchor = link.partition("#")
        target = unquote(url.removeprefix(f"{origin}/"))
        has_moments = target.startswith("steps/")  # named by the address, and checked by the build
        return target in files and (
            not anchor or has_moments or target not in anchors or unquote(anchor) in anchors[target]
        )

    for name, visit in visits.items():
        broken += [f"{name}: {link}" for link in dict.fromkeys(visit.links) if not leads_somewhere(link)]
    return broken


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The address under which a folder is served."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()

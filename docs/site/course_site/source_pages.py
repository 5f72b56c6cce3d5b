"""A page for each source file and folder of the repository. Introduced in phase 3.

Chapters quote and name files; here the reader finds them whole, with line numbers that can be linked to. The pages are
outside of the search, which would otherwise find code before prose. Colours take most of the time of a build;
``-D coloured_sources=PATTERN`` gives them to matching files alone.
"""

from collections.abc import Iterator
from fnmatch import fnmatch
from html import escape
from pathlib import PurePosixPath
from typing import Any

from sphinx.application import Sphinx

from course_site.folds import exercise_lines
from course_site.repository import is_document, page_name, read, relative, source_files, source_folders, summary
from course_site.source_code import coloured, listed, numbered, plain

PROJECT = "infer"
Page = tuple[str, dict[str, Any], str]


def pages(app: Sphinx) -> Iterator[Page]:
    """Every page with its context, as Sphinx asks for them."""
    for folder in sorted(source_folders()):
        yield _page(folder, _listing(folder))
    for path in source_files():
        if not is_document(path):
            yield _page(path, _listed_lines(path, is_coloured=fnmatch(str(path), app.config.coloured_sources)))


def _page(path: PurePosixPath, body: str) -> Page:
    title = str(path) if path.parts else PROJECT
    return _name(path), {"title": title, "body": f"<section>{_heading(path)}{body}</section>"}, "source.html"


def _heading(path: PurePosixPath) -> str:
    """The path, each folder of it a link."""
    steps = [
        f'<a href="{escape(relative(_name(path), _name(parent)))}">{escape(parent.name or PROJECT)}</a>'
        for parent in reversed(path.parents)
    ]
    return f'<h1 class="path">{"<span>/</span><wbr>".join([*steps, escape(path.name or PROJECT)])}</h1>'


def _listed_lines(path: PurePosixPath, *, is_coloured: bool) -> str:
    text, exercises = read(path).removesuffix("\n"), exercise_lines(str(path))
    lines = coloured(text, str(path)) if is_coloured else plain(text)
    rows = [numbered(number, line, exercises.get(number - 1)) for number, line in enumerate(lines, start=1)]
    return f'<div class="highlight source notranslate"><pre>{listed(rows)}</pre></div>'


def _listing(folder: PurePosixPath) -> str:
    inside = [path for path in (*sorted(source_folders()), *source_files()) if path.parent == folder != path]
    rows = []
    for path in inside:
        uri = escape(relative(_name(folder), _name(path)))
        end = "/" if path in source_folders() else ""
        told = escape(summary(path / "__init__.py" if end and path / "__init__.py" in source_files() else path))
        link = f'<a href="{uri}"><code>{escape(path.name)}{end}</code></a>'
        rows.append(f"<li><p>{link} {told.replace('``', '')}</p></li>")
    return f'<ul class="files">{"".join(rows)}</ul>'


def _name(path: PurePosixPath) -> str:
    name = page_name(path)
    assert name is not None, path
    return name


def register(app: Sphinx) -> None:
    app.add_config_value("coloured_sources", "*", "html", str)
    app.connect("html-collect-pages", pages)

"""What of the repository the site shows, on which page, and where names lead. Introduced in phase 3.

Some Markdown files are documents, the site's own pages. Every other text file of the folders below has a page that
shows it, and every folder a list of its files; pictures and the data of reports are linked as the files that they are.
Invariant: pages are named here alone, so a link and the page that it leads to cannot differ.
"""

import ast
import re
from collections.abc import KeysView
from functools import cache
from pathlib import Path, PurePosixPath

from sphinx.util.osutil import relative_uri

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = ("README.md", "adapters/*.md", "docs/*.md", "tutorial/*.md", "benchmarks/reports/*.md")
DATA = ("benchmarks/reports/*.json", "tutorial/recordings/*.json")
"""Files that are shown in another form than as their text."""
HIDDEN = ("tutorial/mistakes/*.toml",)
"""Files without a page: known mistakes are changes to the lines of exercises."""
FOLDERS = ("adapters", "phases", "shared", "tests", "benchmarks", "tutorial", "docs", "constraints")
TOP_FILES = ("README.md", "Makefile", "LICENSE", "pyproject.toml", "conftest.py")
SUFFIXES = (".py", ".toml", ".jinja", ".json", ".md", ".txt", ".css", ".js")
_DOTTED = re.compile(rf"(?:{'|'.join(FOLDERS)})(?:\.\w+)+")

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@cache
def source_files() -> KeysView[PurePosixPath]:
    """Every file that is shown, relative to the root, in order."""
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    paths = [PurePosixPath(path.relative_to(ROOT)) for path in found if path.is_file()]
    shown = [path for path in paths if not any(part.startswith((".", "__pycache__")) for part in path.parts)]
    shown = [path for path in shown if not any(map(path.match, DATA + HIDDEN))]
    top = [PurePosixPath(name) for name in TOP_FILES if (ROOT / name).exists()]
    return dict.fromkeys(sorted([*shown, *top])).keys()  # asked for each name of each page, so found by hash


@cache
def source_folders() -> frozenset[PurePosixPath]:
    """Every folder that has a page, the root among them."""
    return frozenset(parent for path in source_files() for parent in path.parents)


@cache
def is_document(path: PurePosixPath) -> bool:
    """Whether Sphinx makes a page of a file by itself."""
    return any(path.parent == PurePosixPath(pattern).parent and path.match(pattern) for pattern in DOCUMENTS)


def page_name(path: PurePosixPath | str) -> str | None:
    """The page of a file or folder of the repository, or None if it has none."""
    path = PurePosixPath(path)
    if path in source_folders():
        return str("source" / path / "index")
    if path not in source_files():
        return None
    return str(path.with_suffix("")) if is_document(path) else f"source/{path}"


def relative(page: str, other: str) -> str:
    """The address of another page of the site as seen from a page."""
    return relative_uri(f"{page}.html", f"{other}.html")


def anchor(line: int) -> str:
    """The anchor of a line on a file's page, which shows it as the line's number."""
    return str(line)


def find(name: str) -> tuple[str, int | None] | None:
    """Where a path or a dotted name leads: a path relative to the root, and the line of the definition if it is one.

    ``shared/cache/``, ``shared/cache/view/contiguous.py``, ``shared.cache.view.contiguous`` and
    ``shared.cache.view.contiguous.ContiguousCache.reserve`` are found; None for anything else.
    """
    path = PurePosixPath(name.rstrip("/"))
    if path.parts and page_name(path) is not None and ("/" in name or path in source_files()):
        return str(path), None
    return _find_dotted(name.removesuffix("()")) if _DOTTED.fullmatch(name.removesuffix("()")) else None


def _find_dotted(name: str) -> tuple[str, int | None] | None:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        base = PurePosixPath(*parts[:length])
        for path in (base / "__init__.py", base.with_suffix(".py")):
            if path in source_files():
                if length == len(parts):
                    return str(path), None
                line = line_of(str(path), ".".join(parts[length:]))
                return None if line is None else (str(path), line)
    return None


def line_of(path: str, name: str) -> int | None:
    """The line on which a module binds a name such as ``ContiguousView.attend``; decorators come after it."""
    body = _tree(path).body
    for part in (parts := name.split("."))[:-1]:
        classes = [node for node in body if isinstance(node, ast.ClassDef) and node.name == part]
        if not classes:
            return None
        body = classes[0].body
    for node in body:
        if isinstance(node, Definition) and node.name == parts[-1]:
            return node.lineno
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == parts[-1] for target in targets):
            return node.lineno
    return None


def enclosing(path: str, line: int) -> str:
    """The dotted name of the innermost definition that holds a line, or nothing outside of all."""
    names: list[str] = []
    body = _tree(path).body
    while inner := [node for node in body if isinstance(node, Definition) and _first(node) <= line <= _last(node)]:
        names.append(inner[0].name)
        body = inner[0].body
    return ".".join(names)


def summary(path: PurePosixPath) -> str:
    """The first line of a module's docstring; nothing for other files."""
    if path.suffix != ".py":
        return ""
    return (ast.get_docstring(_tree(str(path))) or "").partition("\n")[0]


def read(path: PurePosixPath | str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


@cache
def _tree(path: str) -> ast.Module:
    """A module's syntax tree; an empty one where it has an error, which the linter tells."""
    try:
        return ast.parse(read(path))
    except SyntaxError:
        return ast.Module([], [])


def _first(node: Definition) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _last(node: Definition) -> int:
    return node.end_lineno or node.lineno

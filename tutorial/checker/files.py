"""The files that pages build: fences ``python run file=NAME.py``, joined in order.

A page may import what the pages before it, by name, have built. Invariant: a file holds exactly what its fences show.
"""

from pathlib import Path

from tutorial.checker.chapter import read_chapter


def page_files(page: Path) -> dict[str, str]:
    """The text of each file of a page, by its name."""
    files: dict[str, list[str]] = {}
    for fence in read_chapter(page).fences:
        if fence.kind == "run" and "file" in fence.attributes:
            files.setdefault(fence.attributes["file"], []).append("\n".join(fence.body) + "\n")
    return {name: "\n\n".join(parts) for name, parts in files.items()}


def write_files(page: Path, folder: Path) -> None:
    """Write the files of a page, and of the pages before it, if it builds any."""
    if not page_files(page):
        return
    for other in sorted(page.parent.glob("*.md")):
        if other.name <= page.name:
            for name, text in page_files(other).items():
                (folder / name).write_text(text, encoding="utf-8")

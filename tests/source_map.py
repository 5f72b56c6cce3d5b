"""Writes docs/MAP.md, a line for each folder and each module of the course, from the first sentences of docstrings.

    make map

Invariant: the page depends on the sources alone; modules are read and never imported.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "MAP.md"
AREAS = ("shared", "phases", "benchmarks", "tutorial")
ORDER = (
    *("shared/cli", "shared/deployment", "shared/server", "shared/text", "phases", "shared/engine"),
    *("shared/scheduling", "shared/cache", "shared/speculation", "shared/models", "shared/ops", "shared/attention"),
    *("shared/kernels", "shared/sampling", "shared/grammar", "shared/tracks"),
    *("shared/loading", "shared/quantization", "shared/checkpoints", "shared/tracing", "shared/parity"),
    *("shared/simulation", "shared", "benchmarks", "tutorial"),
)
"""The order in which a request meets folders, then what stands beside its way; a subfolder follows its folder."""
HEAD = """# The map

A line for each folder and each module: the first sentence of its docstring, and the phase that introduced it. Folders
stand in the order in which a request meets them, from the command line and the server through scheduling, memory and
the model to sampling; what a request does not meet comes last. [The design](OVERALL_DESIGN.md) says how they work
together. `make map` writes this page.
"""
ALIKE = """Each folder has `__main__.py` (the command line of the phase), `engine.py` (the loop, below), `lesson.toml`
(title, question, added modules, exercises), `test_parity.py` (the output is right) and, from phase 2 on,
`test_speedup.py` (what the phase gained).
"""
_PHASE = re.compile(r"(Introduced in|introduced in|Follows) phase (\d+(?:\.\d)?[ab]?)")
_ROLE = re.compile(r":\w+:`~?([^`]+)`")


def page() -> str:
    """The text of docs/MAP.md. Raises ValueError for a folder that has no place in ``ORDER``."""
    folders = {file.parent.relative_to(ROOT) for area in AREAS for file in (ROOT / area).rglob("__init__.py")}
    parts = [HEAD]
    for folder in sorted(folders, key=lambda folder: (_place(folder), folder)):
        if folder.parent.name == "phases":
            continue
        sentence, phase = described(ROOT / folder / "__init__.py")
        rows = list(_engines() if folder.name == "phases" else _modules(ROOT / folder))
        parts.append(f"## {folder.as_posix()}\n\n{sentence}{_told(phase)}\n")
        parts += [ALIKE] if folder.name == "phases" else []
        parts.append("\n".join(["| module | what it is | phase |", "|---|---|---|", *rows]) + "\n" if rows else "")
    return "\n".join(filter(None, parts))


def described(file: Path) -> tuple[str, str]:
    """The first sentence of a module's docstring as Markdown, and its phase, ``after N`` or nothing."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    words = " ".join(text.partition("\n\n")[0].split())
    sentence = re.split(r"(?<=\.) (?=[A-Z])", words)[0]
    found = _PHASE.search(" ".join(text.split()))
    phase = "" if found is None else f"after {found[2]}" if found[1] == "Follows" else found[2]
    return _ROLE.sub(r"`\1`", sentence).replace("``", "`").replace("|", "\\|"), phase


def _place(folder: Path) -> int:
    known = next((name for name in (folder, *folder.parents) if name.as_posix() in ORDER), None)
    if known is None or (known == Path("shared") != folder):
        raise ValueError(f"{folder} has no place in ORDER of {Path(__file__).name}; put it where a request meets it.")
    return ORDER.index(known.as_posix())


def _modules(folder: Path) -> Iterator[str]:
    for file in sorted(folder.glob("*.py")):
        if file.name != "__init__.py":
            yield _row(file.name, file)


def _engines() -> Iterator[str]:
    for file in sorted((ROOT / "phases").glob("*/engine.py")):
        sentence, _ = described(file)
        title, _ = described(file.with_name("__init__.py"))
        number = file.parent.name.removeprefix("phase_").lstrip("0").replace("_", ".")
        name = title.partition(": ")[2] or title
        yield f"| `{file.parent.name}` | {name[:1].upper()}{name[1:]} {sentence} | {number} |"


def _row(name: str, file: Path) -> str:
    sentence, phase = described(file)
    return f"| `{name}` | {sentence} | {phase} |"


def _told(phase: str) -> str:
    return f" ({'phase ' if phase[0].isdigit() else ''}{phase})" if phase else ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

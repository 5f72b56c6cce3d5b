"""What README and docs name exists: links and headings, paths, modules, phases, commands and their options.

Modules are read and never imported, so this costs nothing and needs no torch.
"""

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import typer

from shared.cli import app
from shared.lessons import lessons

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = sorted(path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith("."))
TOP_FILES = ("README.md", "Makefile", "LICENSE", "pyproject.toml", "conftest.py")
PLACEHOLDER = "NAME"
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```.*?^```$|^(?: {4}[^\n]*\n)+", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
# Where a command begins: a code span, a prompt, or an indented line.
COMMAND = re.compile(r"(?:`|^\$ |^ {4})infer ([a-z][^`#\n]*)", re.MULTILINE)

in_each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def prose(page: Path) -> str:
    """The page without its code blocks, in which brackets and backticks mean other things."""
    return BLOCK.sub("\n", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """The anchors of the page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("\n", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def spans(page: Path) -> list[str]:
    """What stands in backticks."""
    return SPAN.findall(prose(page))


def looks_like_a_path(text: str) -> bool:
    first, slash, _ = text.partition("/")
    return text in TOP_FILES or (bool(slash) and first in FOLDERS and re.fullmatch(r"[\w./*-]+", text) is not None)


def resolve(dotted: str) -> bool:
    """Whether a name such as ``shared.cache.contiguous.ContiguousCache.reserve`` is a module or an attribute of one."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        base = ROOT.joinpath(*parts[:length])
        source = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
        if source.exists():
            return defines(ast.parse(source.read_text(encoding="utf-8")), parts[length:])
    return False


def defines(node: ast.Module | ast.ClassDef, names: list[str]) -> bool:
    """Whether a module's or class's body binds the first name, and what is bound the rest."""
    if not names:
        return True
    for child in node.body:
        if isinstance(child, ast.ClassDef) and child.name == names[0]:
            return defines(child, names[1:])
        if isinstance(child, ast.FunctionDef) and child.name == names[0]:
            return len(names) == 1
        targets = child.targets if isinstance(child, ast.Assign) else [getattr(child, "target", None)]
        if len(names) == 1 and any(isinstance(target, ast.Name) and target.id == names[0] for target in targets):
            return True
    return False


@cache
def recorder() -> ModuleType:
    """docs/images/record_demo.py, which belongs to no package."""
    spec = importlib.util.spec_from_file_location("record_demo", ROOT / "docs/images/record_demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@in_each_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.is_relative_to(ROOT), f"{target} leads out of the repository"
        assert path.exists(), f"{target} does not exist"
        assert not anchor or anchor in anchors(path), f"{path.name} has no heading #{anchor}"


@in_each_page
def test_paths_exist(page: Path) -> None:
    for span in spans(page):
        if looks_like_a_path(span) and PLACEHOLDER not in span:
            found = list(ROOT.glob(span)) if "*" in span else [ROOT / span]
            assert found, f"`{span}` matches nothing"
            assert all(path.exists() for path in found), f"`{span}` does not exist"


@in_each_page
def test_dotted_names_resolve(page: Path) -> None:
    names = [name for span in spans(page) for name in re.findall(r"\b(?:shared|benchmarks|phases)(?:\.\w+)+", span)]
    for name in names:
        assert resolve(name.removesuffix(".py")), f"`{name}` is no module and no attribute of one"


@in_each_page
def test_commands_exist_with_their_options(page: Path) -> None:
    group = typer.main.get_command(app)
    for line in COMMAND.findall(page.read_text(encoding="utf-8")):
        command, words = group, line.split()
        while words and hasattr(command, "commands") and not words[0].startswith("-"):
            subcommands = words[0].split("|")  # `infer model pull|list|make`
            if command is not group and subcommands[0] not in command.commands:
                break  # a group with arguments of its own
            assert set(subcommands) <= set(command.commands), f"there is no `infer {line}`"
            command, words = command.commands[subcommands[0]], words[1:]
        known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        used = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert used <= known | {"--help"}, f"`infer {line}` uses options that the command does not have"


def test_the_readme_shows_exactly_the_phases_that_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(\w+(?:\.\d)?)\]\(docs/PHASE_(\w+)\.md\) \| (.+?) \| (.+?) \|$", readme, re.MULTILINE)
    assert [(number, title, question) for number, _, title, question in rows] == [
        (lesson.number, lesson.title, lesson.question) for lesson in lessons()
    ]
    assert [page for _, page, _, _ in rows] == [number.upper().replace(".", "_") for number, _, _, _ in rows]


def test_this_test_can_fail() -> None:
    assert resolve("shared.cache.contiguous.ContiguousCache.reserve")
    assert resolve("shared.engine.config.EngineConfig.model")
    assert resolve("shared.ops.attention.ATTENTION_BACKENDS")
    assert not resolve("shared.cache.contiguous.ContiguousCache.append")
    assert not resolve("shared.cache.paged")
    assert looks_like_a_path("shared/cache/paged.py")
    assert not looks_like_a_path("text/plain")
    assert COMMAND.findall("`infer chat --fast`, $ infer no\n$ infer diff 1 2  # why\n    infer phases\n") == [
        "chat --fast",
        "diff 1 2  ",
        "phases",
    ]


def test_the_picture_records_the_demo_of_the_makefile() -> None:
    commands = recorder().demo_commands("my-model")
    assert [command[:2] for command in commands] == [["infer", "generate"], ["infer", "ladder"]]
    assert all("my-model" in command for command in commands)


def test_the_picture_shows_what_a_terminal_would() -> None:
    screen = recorder().Screen(10)
    screen.feed("working\r\x1b[2K\x1b[1mdone\x1b[0m\r\n0123456789ab\r\nbar 10%\r\n\x1b[1A\x1b[2Kthe end")
    assert screen.text() == "\x1b[0m\x1b[1mdone\x1b[0m\n0123456789\nab\nthe end"
    assert recorder().without_json('a\n\n{"x": 1}\n') == "a"
    assert "font-face" not in recorder().draw(screen, "title")

"""What a page names exists: links and headings, paths, modules, commands and their options.

README, ``docs`` and the chapters are held to the same rules. Modules are read and never imported, so this costs
nothing; the command ``infer`` is given by the caller, since nothing in ``tutorial`` imports the command line. Each
function yields a `Problem` for each reference that leads nowhere.
"""

import ast
import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qsl

import pytest

from shared.tracing.steps.moments import find
from tutorial.checker.chapter import Chapter, Problem, read_chapter

FOLDERS = ("benchmarks", "docs", "phases", "shared", "tests", "tutorial")
TOP_FILES = ("README.md", "Makefile", "LICENSE", "pyproject.toml", "conftest.py")
LEARNERS = "workspace/"
"""A learner's copy of ``shared/…`` lies at the same path below this folder, which is not in the repository."""
PLACEHOLDER = "NAME"
INFER = pytest.StashKey[Callable[[], Any]]()
"""Where pytest's configuration keeps what makes the click command ``infer``; the root's conftest.py puts it there."""
_LINK = re.compile(r"""!?\[[^\]]*\]\(([^)\s]+)[^)\n]*\)|\b(?:src|srcset|href)=["']([^"']+)["']""")
_MOMENT = re.compile(r"\]\(([^()\s#]*recordings/\w+\.json)(?:#([^()\s]*))?\)")
_SPAN = re.compile(r"`([^`\n]+)`")
_DOTTED = re.compile(r"\b(?:shared|benchmarks|phases|tutorial)(?:\.\w+)+")
# Where a command begins: a code span, a prompt (variables may precede it), or an indented line.
COMMAND = re.compile(r"(?:`|^ *\$ (?:\w+=\S* )*|^ {4})infer ([a-z][^`#\n]*)")
TARGET = re.compile(r"(?:`|^ *\$ |^ {4})make ([a-z]+)\b")
_END_OF_COMMAND = frozenset({"|", "||", "&&", "&", ";", ">", ">>", "2>", "<"})


def dead_links(page: Chapter, root: Path) -> Iterator[Problem]:
    """Links to files that do not exist, lie outside the repository, or lack the heading or the moment."""
    for line, text in _prose(page):
        for match in _LINK.finditer(text):
            target = match[1] or match[2]
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            path = (page.path.parent / name).resolve() if name else page.path
            if not path.is_relative_to(root.resolve()):
                yield Problem(line, f"the link {target} leads out of the repository")
            elif not path.exists():
                yield Problem(line, f"the link {target} leads to nothing: there is no {path.relative_to(root)}")
            elif anchor and not _MOMENT.search(f"]({target})") and anchor not in anchors(path):
                yield Problem(line, f"the link {target} leads to nothing: {path.name} has no heading #{anchor}")
    yield from _dead_moments(page, root)


def missing_paths(page: Chapter, root: Path) -> Iterator[Problem]:
    """Paths in backticks or in commands that do not exist in the repository."""
    for line, span in (*_spans(page), *_words_of_commands(page)):
        span = span.partition("::")[0]  # a pytest node id
        if looks_like_a_path(span) and PLACEHOLDER not in span:
            path = span.removeprefix(LEARNERS)
            if not (list(root.glob(path)) if "*" in path else (root / path).exists()):
                yield Problem(line, f"`{span}` does not exist")


def unknown_names(page: Chapter, root: Path) -> Iterator[Problem]:
    """Dotted names in backticks or in commands that are neither a module nor an attribute of one."""
    for line, span in (*_spans(page), *_words_of_commands(page)):
        for name in _DOTTED.findall(span):
            if not resolves(name.removesuffix(".py"), root):
                yield Problem(line, f"`{name}` is no module and no attribute of one")


def unknown_commands(page: Chapter, root: Path, infer: Any) -> Iterator[Problem]:
    """Commands of ``infer`` that do not exist or lack an option that is used; ``make`` targets that do not exist."""
    targets = set(re.findall(r"^([a-z]+):", (root / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for line, text in enumerate(page.lines, start=1):
        for command in COMMAND.findall(text):
            if (wrong := command_error(command, infer)) is not None:
                yield Problem(line, wrong)
        for target in TARGET.findall(text):
            if target not in targets:
                yield Problem(line, f"there is no target `make {target}`")


def _dead_moments(page: Chapter, root: Path) -> Iterator[Problem]:
    """Links to a moment that a recording of steps does not have; the words of a link may span several lines."""
    for line, text in _prose(page):
        for target, address in _MOMENT.findall(text):
            path = (page.path.parent / target).resolve()
            if (wrong := moment_error(path, address) if path.exists() else f"there is no {path.name}") is not None:
                yield Problem(line, f"the link {target}#{address} leads to nothing: {wrong}")


CHECKS = MappingProxyType({"links": dead_links, "paths": missing_paths, "names": unknown_names})


def looks_like_a_path(text: str) -> bool:
    """Whether the text in backticks is meant as a path in the repository."""
    first, slash, _ = text.removeprefix(LEARNERS).partition("/")
    return text in TOP_FILES or (bool(slash) and first in FOLDERS and re.fullmatch(r"[\w./*-]+", text) is not None)


def resolves(dotted: str, root: Path) -> bool:
    """Whether a name such as ``shared.cache.view.contiguous.ContiguousCache.reserve`` is a module or an attribute of
    one.
    """
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        base = root.joinpath(*parts[:length])
        source = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
        if source.exists():
            return _defines(ast.parse(source.read_text(encoding="utf-8")), parts[length:])
    return False


def command_error(line: str, infer: Any) -> str | None:
    """What is wrong with the arguments of ``infer``; None if the command exists and has the options that are used.

    Args:
        infer: the click command.
    """
    try:
        words = shlex.split(line)
    except ValueError:  # cut inside quotes
        words = line.split()
    words = words[: words.index("|")] if "|" in words else words  # what it is piped into is another's command
    command, is_root = infer, True
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        subcommands = words[0].split("|")  # `infer model pull|list|make`
        if not set(subcommands) <= set(command.commands):
            if (default := getattr(command, "default", None)) is not None:
                command = command.commands[default]  # `infer deploy MODEL` is `infer deploy start MODEL`
                break
            if not is_root and command.params:
                break  # a group with arguments of its own
            return f"there is no command `infer {line.strip()}`"
        command, words, is_root = command.commands[subcommands[0]], words[1:], False
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    end = next((i for i, word in enumerate(words) if word in _END_OF_COMMAND), len(words))
    used = {word.partition("=")[0] for word in words[:end] if re.match(r"--?[a-z][\w-]*(?:=|$)", word)}
    if unknown := used - known - {"--help"}:
        return f"`infer {line.strip()}` uses {', '.join(sorted(unknown))}, which the command does not have"
    return None


def moment_error(path: Path, address: str) -> str | None:
    """What is wrong with the address of a moment, such as ``step=7&line=schedule`` or ``ask=predict``; None if the
    recording has it. A recording of two phases side by side has the moments of the later one.
    """
    path = path.with_stem(path.stem.partition("_by_")[0])
    recording = json.loads(path.read_text(encoding="utf-8"))
    names = dict(parse_qsl(address, keep_blank_values=True))
    if unknown := set(names) - {"step", "line", "ask"}:
        return f"an address has no {', '.join(sorted(unknown))}"
    if "ask" in names:
        asked = [each for each in recording.get("questions", ()) if each["name"] == names["ask"]]
        return None if asked else f"{path.name} asks no question {names['ask']!r}"
    step, line = names.get("step", "0"), names.get("line", "")
    if not step.isdecimal() or find(recording, int(step), line) is None:
        return f"{path.name} has no line {line!r} in step {step}"
    return None


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = [match[1] for _, text in _prose(read_chapter(path)) if (match := re.match(r"#+ (.*)$", text))]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _prose(page: Chapter) -> list[tuple[int, str]]:
    """The page's lines with their numbers, without code, in which brackets and backticks mean other things."""
    return [(line, text) for line, text in enumerate(page.prose, start=1) if not text.startswith("    ")]


def _spans(page: Chapter) -> Iterator[tuple[int, str]]:
    """The text in backticks, with its line."""
    for line, text in _prose(page):
        yield from ((line, span) for span in _SPAN.findall(text))


def _words_of_commands(page: Chapter) -> Iterator[tuple[int, str]]:
    """The words after each prompt, with their line; they name files and modules even where nothing is run."""
    for line, text in enumerate(page.lines, start=1):
        if text.lstrip().startswith("$ "):
            yield from ((line, word) for word in text.split()[1:])


def _defines(node: ast.Module | ast.ClassDef, names: list[str]) -> bool:
    """Whether a module's or class's body binds the first name, and what is bound the rest."""
    if not names:
        return True
    for child in node.body:
        if isinstance(child, ast.ClassDef) and child.name == names[0]:
            return _defines(child, names[1:])
        if isinstance(child, ast.FunctionDef) and child.name == names[0]:
            return len(names) == 1
        targets = child.targets if isinstance(child, ast.Assign) else [getattr(child, "target", None)]
        if len(names) == 1 and any(isinstance(target, ast.Name) and target.id == names[0] for target in targets):
            return True
    return False

"""Takes from the repository what a page quotes: the source of a name, and the difference of two phases.

A quoted name is moved to the left margin, each exercise in it folded into one line; with ``nodoc`` it is without its
docstrings. Everything else is the source to the letter, so a reader can search for any line of it.
"""

import ast
import difflib
import textwrap
from pathlib import Path

from shared.errors import ConfigError
from shared.lesson_source import ENGINE, file_diff, methods, module_file, phase_pair, replaced_parts
from shared.lessons import Lesson
from tutorial.checker.chapter import Fence, Problem
from tutorial.checker.folds import fold
from tutorial.checker.report import changed
from tutorial.workshop.exercises import regions

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_WHOLE = 10_000  # lines of context: a method is shown whole


def check_quote(fence: Fence, root: Path) -> list[Problem]:
    """Compare a ``source=`` fence with the source."""
    try:
        found = quoted_source(root, fence.attributes["source"], with_docstrings="nodoc" not in fence.attributes)
    except ConfigError as error:
        return [Problem(fence.line, str(error))]
    return changed(fence, found, f"the code is not that of {fence.attributes['source']}")


def check_diff(fence: Fence) -> list[Problem]:
    """Compare a ``diff phases=`` fence with the two engines, or with their parts."""
    phases, target = fence.attributes["phases"], fence.attributes.get("target")
    try:
        found = phase_diff(phases, target)
    except ConfigError as error:
        return [Problem(fence.line, str(error))]
    return changed(fence, found, f"the diff is not that of phases {phases}")


def quoted_source(root: Path, target: str, *, with_docstrings: bool = True) -> list[str]:
    """The lines of ``PATH#NAME``, or of the whole file without ``#NAME``; ConfigError if there is no such thing."""
    path, _, name = target.partition("#")
    file = (root / path).resolve()
    if not file.is_relative_to(root.resolve()) or file.suffix != ".py" or not file.is_file():
        raise ConfigError(f"There is no source {path!r} in the repository; a source is PATH.py or PATH.py#NAME.")
    text = file.read_text(encoding="utf-8")
    tree = ast.parse(text)
    node = _find(tree, name.split(".")) if name else tree
    if node is None:
        there = ", ".join(_names(tree))
        raise ConfigError(f"{path} has no {name!r}; at its top level it has {there or 'no name'}.")
    lines = text.splitlines()
    first, last = _extent(node, lines)
    dropped = set() if with_docstrings else _docstring_lines(node, lines)
    for region in regions(text, path):
        lines[region.begin] = fold(region.number, region.indent)
        dropped |= set(range(region.begin + 1, region.end + 1))
    kept = [lines[i] for i in range(first, last) if i not in dropped]
    return textwrap.dedent("\n".join(kept)).rstrip("\n").split("\n")


def phase_diff(phases: str, target: str | None) -> list[str]:
    """The unified diff of two phases' ``engine.py``, or of one method, which is then shown whole.

    Raises ConfigError for phases that do not exist or are in the wrong order, for a target that is no method of
    either engine, nor of a part that the newer one replaces, and where nothing differs.
    """
    older, dots, newer = phases.partition("..")
    if not dots or not older or not newer:
        raise ConfigError(f"phases={phases} cannot be read; write two numbers with two points between, as in 02..03.")
    before, after = phase_pair(older, newer)
    if target is None:
        return list(file_diff(before, after, ENGINE))
    owner, _, method = target.partition(".")
    if not method:
        raise ConfigError(f"target={target} cannot be read; write a class and its method, as in Engine.generate.")
    if owner == "Engine":
        old, new = (methods(lesson).get(method) for lesson in (before, after))
    else:
        old, new = _replaced_method(before, after, owner, method)
    if old is None and new is None:
        raise ConfigError(f"Neither phase {before.number} nor phase {after.number} has a method {target}.")
    if old == new:
        raise ConfigError(f"{target} is the same in the phases {before.number} and {after.number}; there is no diff.")
    old_lines, new_lines = (textwrap.dedent(side or "").splitlines() for side in (old, new))
    _, _, _, *lines = difflib.unified_diff(old_lines, new_lines, n=_WHOLE, lineterm="")
    return lines


def _replaced_method(before: Lesson, after: Lesson, owner: str, method: str) -> tuple[str | None, str | None]:
    """A method of the class ``owner``, in a part that replaces another, and before it that of the replaced class; both
    without docstrings.
    """
    for old, new in replaced_parts(before, after):
        if owner in _names(_tree(new)):
            former = next((name for name in _names(_tree(old)) if _find(_tree(old), [name, method])), None)
            return _method(old, former, method), _method(new, owner, method)
    return None, None


def _method(module: str, owner: str | None, method: str) -> str | None:
    if owner is None or _find(_tree(module), [owner, method]) is None:
        return None
    file = module_file(module)
    return "\n".join(quoted_source(file.parent, f"{file.name}#{owner}.{method}", with_docstrings=False))


def _tree(module: str) -> ast.Module:
    return ast.parse(module_file(module).read_text(encoding="utf-8"))


def _find(node: ast.AST, names: list[str]) -> ast.stmt | None:
    """The definition or assignment of a dotted name below ``node``."""
    for child in getattr(node, "body", []):
        if names[0] not in _bound(child):
            continue
        if len(names) == 1:
            return child
        if isinstance(child, ast.ClassDef):
            return _find(child, names[1:])
    return None


def _names(tree: ast.Module) -> list[str]:
    return [name for node in tree.body for name in _bound(node)]


def _bound(node: ast.stmt) -> list[str]:
    """The names that a definition or an assignment binds."""
    if isinstance(node, Definition):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _extent(node: ast.stmt | ast.Module, lines: list[str]) -> tuple[int, int]:
    """The lines [first, last) of a node, decorators included, counted from 0."""
    if isinstance(node, ast.Module):
        return 0, len(lines)
    decorators = [decorator.lineno for decorator in getattr(node, "decorator_list", [])]
    return min([node.lineno, *decorators]) - 1, node.end_lineno or node.lineno


def _docstring_lines(node: ast.AST, lines: list[str]) -> set[int]:
    """The lines of all docstrings below a node, with the empty line after each; none if anything else is on them."""
    found: set[int] = set()
    for owner in ast.walk(node):
        if not isinstance(owner, Definition | ast.Module) or ast.get_docstring(owner) is None:
            continue
        string = owner.body[0]
        first, last = string.lineno - 1, string.end_lineno or string.lineno
        alone = lines[first][: string.col_offset].strip() == "" and len(owner.body) > 1
        if alone and lines[last - 1][string.end_col_offset :].strip() == "":
            found |= set(range(first, last))
            if last < len(lines) and not lines[last].strip():
                found.add(last)
    return found

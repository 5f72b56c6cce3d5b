"""Parts are composed, not stacked: no class of the course has more than one ancestor in it.

An interface and its implementations. Protocols may extend protocols, and an error says with its ancestors who catches
it. What a step passes through is complete in its own class: a scheduler's ``schedule`` and a view's ``load`` call no
ancestor's, and no exercise is inside them, so that a solved exercise is in every later phase too.
"""

import ast
import builtins
from collections.abc import Mapping

import pytest

from tests.unit.test_imports import ROOT

ERRORS = {name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, Exception)}
FOLDERS = ("shared", "phases", "benchmarks", "tutorial")


def bases_of(source: str) -> dict[str, list[str]]:
    """For each class of a source the names of its bases, without parameters of types and modules."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
            found[node.name] = [ast.unparse(base).rpartition(".")[2] for base in bases]
    return found


def stacked(bases: Mapping[str, list[str]]) -> list[str]:
    """The classes with more than one ancestor among them, each with its ancestors."""

    def ancestors(name: str) -> list[str]:
        """Those of other modules too, whose own are not known; a class may have the name of its base."""
        own = [base for base in bases.get(name, []) if base != name]
        return [above for base in own for above in (base, *ancestors(base))]

    found = {name: ancestors(name) for name in bases}
    return [
        f"{name}: {', '.join(ours)}"
        for name, above in found.items()
        if len(ours := [one for one in above if one in bases]) > 1
        and not any(one in ERRORS for one in above)
        and "Protocol" not in bases[name]
    ]


def test_no_class_has_more_than_one_ancestor() -> None:
    bases: dict[str, list[str]] = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not path.name.startswith("test_"):
                bases |= bases_of(path.read_text(encoding="utf-8"))
    assert len(bases) > 500
    assert stacked(bases) == []


def test_a_schedule_and_a_load_read_from_top_to_bottom() -> None:
    methods: dict[str, str] = {}
    for folder in ("shared/scheduling", "shared/tracks", "shared/cache/view"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            lines = path.read_text(encoding="utf-8").splitlines()
            for node in ast.walk(ast.parse("\n".join(lines))):
                if isinstance(node, ast.ClassDef):
                    for part in node.body:
                        name = part.name if isinstance(part, ast.FunctionDef) else ""
                        if name == "schedule" or (name == "load" and node.name.endswith("View")):
                            methods[f"{node.name}.{name}"] = "\n".join(lines[part.lineno - 1 : part.end_lineno])
    assert {"StaticScheduler.schedule", "MultiTokenScheduler.schedule", "PagedView.load"} <= methods.keys()
    for name, source in methods.items():
        assert "super()" not in source, name
        assert "# exercise" not in source, name
        assert source.count("\n") < 40, name


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("class A: ...\nclass B(A): ...", []),
        ("class A: ...\nclass B(A): ...\nclass C(B): ...", ["C: B, A"]),
        ("class A: ...\nclass B: ...\nclass C(A, B): ...", ["C: A, B"]),
        ("class A(Protocol): ...\nclass B(A, Protocol): ...\nclass C(B, Protocol): ...", []),
        ("class A(Exception): ...\nclass B(A): ...\nclass C(B): ...", []),
        ("class A(Generic[T]): ...\nclass B(a.A[int]): ...\nclass C(B): ...", ["C: B, A"]),
    ],
)
def test_what_is_stacked_is_found(source: str, expected: list[str]) -> None:
    assert stacked(bases_of(source)) == expected

"""Imports run one way: phases → shared; benchmarks, tutorial → shared; the command line → all; no circles.

Every import counts, inside a function and under ``TYPE_CHECKING`` as well: each says what a module cannot be read
without.
"""

import ast
from collections.abc import Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAY_IMPORT = {
    "shared": {"shared"},
    "benchmarks": {"benchmarks", "shared"},
    "tutorial": {"tutorial", "benchmarks", "shared"},
    "shared.cli": {"shared.cli", "tutorial", "benchmarks", "shared"},
    "phases": {"phases", "shared.cli", "benchmarks", "shared"},  # benchmarks for the tests of speed
}
ALLOWED = ("shared.lessons", "phases")  # reads the folder, and loads a phase by its name


def import_graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """For each module those of the others that its source imports."""
    graph = {}
    for importer, source in sources.items():
        imported = set()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{importer} imports by a relative name; write the whole name"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                imported |= {name if name in sources else node.module for name in names}
        graph[importer] = imported & sources.keys()
    return graph


def offences(graph: Mapping[str, set[str]]) -> list[str]:
    """Each import that may not be, and a circle if there is one, as chains."""
    edges = [(module, other) for module in sorted(graph) for other in sorted(graph[module])]
    found = [edge for edge in edges if area(edge[1]) not in MAY_IMPORT[area(edge[0])] and edge != ALLOWED]
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found.append(tuple(reversed(error.args[1])))
    return [" imports ".join(chain) for chain in found]


def area(module: str) -> str:
    return "shared.cli" if f"{module}.".startswith("shared.cli.") else module.partition(".")[0]


@cache
def course_graph() -> dict[str, set[str]]:
    sources = {}
    for folder in ("benchmarks", "phases", "shared", "tutorial"):
        for file in (ROOT / folder).rglob("*.py"):
            name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            sources[name] = file.read_text(encoding="utf-8")
    return import_graph(sources)


def test_imports_run_one_way() -> None:
    graph = course_graph()
    assert sum(map(len, graph.values())) > 500
    assert not (found := offences(graph)), "\n".join(found)


SOURCES = {
    "shared.a": "",
    "shared.b": "from shared.a import A",
    "shared.lessons": "import phases",
    "shared.cli": "import tutorial.check",
    "tutorial.check": "import ast",
    "phases": "",
}


@pytest.mark.parametrize(
    ("module", "source", "told"),
    [
        ("shared.a", "def f():\n    import shared.b", "shared.a imports shared.b imports shared.a"),
        ("shared.a", "if TYPE_CHECKING:\n    from tutorial import check", "shared.a imports tutorial.check"),
        ("shared.a", "import shared.cli, phases", "shared.a imports phases, shared.a imports shared.cli"),
        ("tutorial.check", "from shared.cli import app", "tutorial.check imports shared.cli"),
    ],
)
def test_a_wrong_import_is_told(module: str, source: str, told: str) -> None:
    assert not offences(import_graph(SOURCES))
    assert told in ", ".join(offences(import_graph(SOURCES | {module: source})))

"""Code that uses the KV cache depends on protocols only: no implementation class, no probing, no name of a backend.

Read from the source: of the engines, of what they are made of, and of the models. Only the tables that turn a setting
into a memory may say which kinds there are, and ``shared.engine.config`` with its rules, which name the settings. The
memory has two sides, of which neither imports the other: the accounts on the host, and views on the device.
"""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.unit.test_imports import ROOT, course_graph

ENGINES = sorted(path for path in ROOT.glob("phases/*/engine.py") if path.parent.name >= "phase_04")
PARTS = sorted(
    path
    for folder in ("engine", "scheduling", "models")
    for path in (ROOT / "shared" / folder).rglob("*.py")
    if path.name not in ("__init__.py", "config.py", "config_rules.py", "supported.py") or folder == "models"
)
BACKENDS = re.compile(r"\b(paged|contiguous|planned)", re.IGNORECASE)
PROBES = {"isinstance", "issubclass", "hasattr", "getattr", "setattr", "delattr", "type", "vars", "dir"}
TABLES = ("PAGED", "MEMORY", "SUPPORTED")
# And what passes between the two sides.
PROTOCOLS = {f"shared.cache.{name}" for name in ("pool.interface", "view.interface", "layout.slots")}
PROTOCOLS |= {"shared.tracks.compression.interface"}
MEMORY = re.compile(r"\b(pool|view|kv)\b")
"""Names that the memory goes by."""


def docstrings(tree: ast.Module) -> set[ast.AST]:
    bodies = [node.body for node in ast.walk(tree) if hasattr(node, "body") and isinstance(node.body, list)]
    lines = {line.value for body in bodies for line in body if isinstance(line, ast.Expr)}
    return {line for line in lines if isinstance(line, ast.Constant)}


def in_tables(tree: ast.Module) -> set[ast.AST]:
    """All of the tables, and of ``MEMORY[config.kv_cache_backend or "…"]`` the names in the brackets."""
    found: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id in TABLES for target in targets):
                found |= set(ast.walk(node))
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "MEMORY":
            found |= set(ast.walk(node.slice))
    return found


def found_in(source: str) -> Iterator[str]:
    """What breaks the rule, a line each; that only members of the protocols are used is checked by mypy."""
    tree = ast.parse(source)
    unread = in_tables(tree) | docstrings(tree)
    concrete = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shared.cache")
        for alias in node.names
        if node.module not in PROTOCOLS
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and any(alias.name.startswith("shared.cache") for alias in node.names):
            yield f"{ast.unparse(node)}: a module of which anything could be used"
        if node in unread:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and BACKENDS.search(node.value):
            yield f"{node.value!r} names a backend"
        if isinstance(node, ast.Name) and node.id in concrete:
            yield f"{node.id} is used outside of the tables"
        is_probe = isinstance(node, ast.Call) and ast.unparse(node.func) in PROBES
        if is_probe and any(MEMORY.search(ast.unparse(argument)) for argument in node.args):
            yield f"{ast.unparse(node)} asks what the memory is"


def test_the_memory_is_known_by_its_protocol_alone() -> None:
    """A scheduler imports the host's side alone, and a model neither."""
    for path in (*ENGINES, *PARTS):
        assert list(found_in(path.read_text(encoding="utf-8"))) == [], path
    may = {"engine": PROTOCOLS, "scheduling": {"shared.cache.pool.interface"}, "models": set()}
    for path in PARTS:
        parts = path.relative_to(ROOT).with_suffix("").parts
        found = course_graph()[".".join(parts).removesuffix(".__init__")]
        assert found & MODULES <= may[parts[1]], path


# The two sides of the memory.


def modules(*folders: str) -> set[str]:
    """The modules below these folders of shared."""
    files = (file for folder in folders for file in (ROOT / "shared" / folder).rglob("*.py"))
    return {".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files if file.stem != "__init__"}


MODULES = modules("cache")
POOLS = modules("cache/pool")
HOST = POOLS | modules("cache/layout") | {f"shared.tracks.compression.{name}" for name in ("layout", "pool")}
DEVICE = modules("cache/view") | {"shared.tracks.segments.view"}
DEVICE |= {
    f"shared.tracks.compression.{name}"
    for name in ("kept_cells", "kernel_attention", "operations_attention", "query_ring")
}
VIEWS = DEVICE | (MODULES - HOST)  # with those that make both sides


def test_neither_side_imports_the_other() -> None:
    """The host's side not through other modules either: a pool can be used where no view can."""
    reached, left = set(), [*HOST]
    while left:
        module = left.pop()
        reached.add(module)
        left += course_graph()[module] - reached
    assert not reached & (VIEWS | {"shared.engine.executor.staging", "shared.engine.runner"})
    assert {"shared.cache.layout.slots", "shared.scheduling.schedule", "shared.engine.request"} <= reached
    for name in ("engine.batch", "engine.memory_map", "engine.record", "engine.request", "tracks.multi_token.batch"):
        assert not course_graph()[f"shared.{name}"] & VIEWS, name
    for name in DEVICE:
        assert not course_graph()[name] & POOLS - {"shared.cache.pool.interface"}, name


@pytest.mark.parametrize(
    ("source", "breaks"),
    [
        ("import shared.cache.pool.paged", True),
        ("from shared.cache.pool.paged import PagedKVCachePool\npool = PagedKVCachePool(model)", True),
        ("if config.kv_cache_backend == 'paged': pass", True),
        ("if type(scheduler.pool) is Pool: pass", True),
        ("getattr(self.view, 'tables', None)", True),
        ("from shared.cache.paged_memory import PagedMemory\nMEMORY: dict = {'paged': PagedMemory()}", False),
        ("self.pool, self.view = MEMORY[config.kv_cache_backend or 'paged'](config, self.model, 8)", False),
        ("from shared.cache.view.interface import BatchView\nview: BatchView", False),
        ("tokens, logit_rows = self.view.load(batch)", False),
        ("isinstance(prompt, str), keys.contiguous()", False),
        ('"""Paged memory."""', False),
    ],
)
def test_what_breaks_the_rule_is_found(source: str, breaks: bool) -> None:
    assert bool(list(found_in(source))) is breaks


def test_there_are_files_to_read() -> None:
    assert {"scheduler.py", "isolation.py", "llama.py", "batch.py"} <= {path.name for path in PARTS}
    assert {path.parent.name for path in ENGINES} >= {"phase_04", "phase_05", "phase_06"}
    assert {"shared.cache.pool.blocks", "shared.cache.pool.interface"} <= POOLS
    assert {"shared.cache.view.interface", "shared.cache.view.paged"} <= DEVICE

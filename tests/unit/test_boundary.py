"""Code that uses the KV cache depends on protocols only: no implementation class, no probing, no name of a backend.

Read from the source: of the engines, of what they are made of, and of the models. Only the tables that turn a setting
into a memory may say which kinds there are, and ``shared.engine.config`` with its rules, which name the settings. The
memory has two sides, of which neither knows the other: the accounts on the host, without a tensor, and views on the
device.
"""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from shared.cache.contiguous_pool import ContiguousKVCachePool
from shared.cache.paged import PagedKVCachePool
from shared.cache.pool import CachePoolProtocol
from tests.steps import make_request, step_of

ROOT = Path(__file__).parents[2]
ENGINES = sorted(path for path in ROOT.glob("phases/*/engine.py") if path.parent.name >= "phase_04")
PARTS = sorted(
    path
    for folder in ("engine", "scheduling", "models")
    for path in (ROOT / "shared" / folder).glob("*.py")
    if path.name not in ("__init__.py", "config.py", "config_rules.py") or folder == "models"
)
BACKENDS = re.compile(r"\b(paged|contiguous|planned)", re.IGNORECASE)
PROBES = {"isinstance", "issubclass", "hasattr", "getattr", "setattr", "delattr", "type", "vars", "dir"}
TABLES = ("MEMORY", "SUPPORTED")
# And what passes between the two sides.
PROTOCOLS = {f"shared.cache.{name}" for name in ("pool", "view", "layout", "compressing")}


MEMORY = re.compile(r"\b(pool|view|kv)\b")
"""Names that the memory goes by."""


def docstrings(tree: ast.Module) -> set[ast.AST]:
    bodies = [node.body for node in ast.walk(tree) if hasattr(node, "body") and isinstance(node.body, list)]
    lines = {line.value for body in bodies for line in body if isinstance(line, ast.Expr)}
    return {line for line in lines if isinstance(line, ast.Constant)}


def in_tables(tree: ast.Module) -> set[ast.AST]:
    """All of the tables, and of ``MEMORY[config.kv_cache_backend or "…"]`` what stands in the brackets."""
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
    allowed = in_tables(tree)
    unread = docstrings(tree)
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
        if node in allowed or node in unread:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and BACKENDS.search(node.value):
            yield f"{node.value!r} names a backend"
        if isinstance(node, ast.Name) and node.id in concrete:
            yield f"{node.id} is used outside of the tables"
        is_probe = isinstance(node, ast.Call) and ast.unparse(node.func) in PROBES
        if is_probe and any(MEMORY.search(ast.unparse(argument)) for argument in node.args):
            yield f"{ast.unparse(node)} asks what the memory is"


@pytest.mark.parametrize("path", [*ENGINES, *PARTS], ids=lambda path: str(path.relative_to(ROOT)))
def test_the_memory_is_known_by_its_protocol_alone(path: Path) -> None:
    assert list(found_in(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("path", PARTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_engines_are_made_of_imports_no_pool(path: Path) -> None:
    """A scheduler knows the host's side alone, and a model neither."""
    found = imports(path.read_text(encoding="utf-8")) & {f"shared.cache.{path.stem}" for path in CACHE}
    may = {"engine": PROTOCOLS, "scheduling": {"shared.cache.pool"}, "models": set()}
    assert found <= may[path.parent.name]


# The two sides of the memory.

CACHE = sorted(path for path in (ROOT / "shared/cache").glob("*.py") if path.stem != "__init__")
HOST = {path.stem for path in CACHE if path.stem.endswith("_layout")} | {
    *("blocks", "bucket_planner", "condensed", "condensed_prefix", "contiguous_pool", "layout", "paged", "paired"),
    *("planned", "pool", "prefix", "prefix_tree"),
}
# They make both sides, or join them.
MAKERS = {path.stem for path in CACHE if path.stem.endswith("_memory")} | {"compressing", "pool_size"}
DEVICE = {path.stem for path in CACHE} - HOST - MAKERS
VIEWS = {f"shared.cache.{name}" for name in DEVICE | MAKERS}
HOST_FILES = [path for path in CACHE if path.stem in HOST] + sorted(
    path for path in (ROOT / "shared/scheduling").glob("*.py") if path.stem != "__init__"
)
HOST_FILES += [
    ROOT / "shared/engine" / f"{name}.py" for name in ("batch", "memory_map", "multi_token_batch", "record", "request")
]


def imports(source: str) -> set[str]:
    """The modules that a source imports anywhere, and what it imports from them, which may be modules as well."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def knows_a_view(source: str) -> Iterator[str]:
    """What a module of the host's side has no business with, a line each."""
    for name in sorted(imports(source) & (VIEWS | {"shared.engine.staging", "shared.engine.runner"})):
        yield f"imports {name}"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.Tensor":
            yield "speaks of tensors"
        elif isinstance(node, ast.Name | ast.arg | ast.Attribute):
            name = getattr(node, "id", None) or getattr(node, "arg", None) or getattr(node, "attr", "")
            if name == "view" or name.endswith("View"):
                yield f"speaks of {name}"


def knows_a_pool(source: str) -> Iterator[str]:
    """Each pool that a view speaks of."""
    for definition in ast.parse(source).body:
        if isinstance(definition, ast.ClassDef):
            for node in ast.walk(definition):
                name = getattr(node, "id", None) or getattr(node, "arg", None) or getattr(node, "attr", "")
                if isinstance(name, str) and (name == "pool" or name.endswith(("Pool", "Allocator", "PoolProtocol"))):
                    yield f"{definition.name} speaks of {name}"


@pytest.mark.parametrize("path", HOST_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_hosts_side_knows_no_view(path: Path) -> None:
    assert list(knows_a_view(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("name", sorted(DEVICE))
def test_the_devices_side_knows_no_pool(name: str) -> None:
    source = (ROOT / "shared/cache" / f"{name}.py").read_text(encoding="utf-8")
    assert list(knows_a_pool(source)) == []
    pools = {
        f"shared.cache.{name}" for name in ("contiguous_pool", "paged", "planned", "prefix", "prefix_tree", "blocks")
    }
    assert not imports(source) & pools


def test_nothing_on_the_hosts_side_leads_to_a_view() -> None:
    """Not through others either: a pool can be used where no view can."""
    sources = {
        f"{'.'.join(path.relative_to(ROOT).with_suffix('').parts)}": path.read_text(encoding="utf-8")
        for path in (ROOT / "shared").rglob("*.py")
    }
    reached, left = set(), [f"shared.cache.{name}" for name in HOST]
    while left:
        module = left.pop()
        reached.add(module)
        left += [name for name in imports(sources[module]) if name in sources and name not in reached]
    assert not reached & VIEWS
    assert {"shared.cache.layout", "shared.scheduling.schedule", "shared.engine.request"} <= reached


@pytest.mark.parametrize("make", [lambda: ContiguousKVCachePool(2, 8), lambda: PagedKVCachePool(4, 2, 2)])
def test_a_pool_holds_no_tensor(make: Callable[[], CachePoolProtocol]) -> None:
    """Not in what it holds either, nor in what it gives."""
    pool, request = make(), make_request("a")
    pool.reserve(request, 4)
    left, seen = [pool, pool.layout(step_of({request: 3}))], set()
    while left:
        value = left.pop()
        assert not isinstance(value, torch.Tensor)
        if id(value) not in seen:
            seen.add(id(value))
            left += [*value.keys(), *value.values()] if isinstance(value, dict) else []
            left += list(value) if isinstance(value, list | tuple) else []
            left += list(vars(value).values()) if hasattr(value, "__dict__") else []


@pytest.mark.parametrize(
    ("finds", "source"),
    [
        (knows_a_view, "from shared.cache import view"),
        (knows_a_view, "def f():\n    import shared.cache.contiguous_pool_view"),
        (knows_a_view, "from shared.engine.staging import Staging"),
        (knows_a_view, "x: torch.Tensor"),
        (knows_a_view, "def view(self): return PagedView(self)"),
        (knows_a_pool, "class View:\n    def __init__(self, pool): pass"),
        (knows_a_pool, "class View:\n    def f(self): return PagedKVCachePool(1, 1, 1)"),
        (found_in, "import shared.cache.paged"),
        (found_in, "from shared.cache.paged import PagedKVCachePool\npool = PagedKVCachePool(model)"),
        (found_in, "if config.kv_cache_backend == 'paged': pass"),
        (found_in, "if type(scheduler.pool) is Pool: pass"),
        (found_in, "getattr(self.view, 'tables', None)"),
    ],
)
def test_what_breaks_the_rule_is_found(finds: Callable[[str], Iterator[str]], source: str) -> None:
    assert list(finds(source))


@pytest.mark.parametrize(
    "source",
    [
        "from shared.cache.paged_memory import paged_memory\nMEMORY: dict = {'paged': paged_memory}",
        "self.pool, self.view = MEMORY[config.kv_cache_backend or 'paged'](config, self.model, 8)",
        "from shared.cache.view import BatchView\nview: BatchView",
        "tokens, logit_rows = self.view.load(batch)",
        "isinstance(prompt, str), keys.contiguous()",
        '"""Paged memory."""',
    ],
)
def test_what_keeps_it_is_not(source: str) -> None:
    assert not list(found_in(source))


def test_there_are_files_to_read() -> None:
    assert {"scheduler.py", "isolation.py", "llama.py", "batch.py"} <= {path.name for path in PARTS}
    assert {path.parent.name for path in ENGINES} >= {"phase_04", "phase_05", "phase_06"}
    assert {path.stem for path in CACHE} >= HOST | MAKERS
    assert {"view", "paged_view", "prefix_view", "contiguous_pool_view"} <= DEVICE

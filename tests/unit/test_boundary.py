"""Who uses the memory knows protocols and nothing of what is behind them: no class, no probing, no name of a backend.

Read from the source: of the engines, of what they are made of, and of the models. Only the tables that turn a setting
into a class may say which kinds of memory there are, and ``shared.engine.config``, which names the settings.
"""

import ast
import inspect
import re
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from shared.cache.pool import BatchView, CachePoolProtocol
from shared.models.tokens import KVView

ROOT = Path(__file__).parents[2]
ENGINES = sorted(path for path in ROOT.glob("phases/*/engine.py") if path.parent.name >= "phase_04")
PARTS = sorted(
    path
    for folder in ("engine", "scheduling", "models")
    for path in (ROOT / "shared" / folder).glob("*.py")
    if path.name not in ("__init__.py", "config.py") or folder == "models"
)
BACKENDS = re.compile(r"\b(paged|contiguous|planned|contiguous)", re.IGNORECASE)
PROBES = {"isinstance", "issubclass", "hasattr", "getattr", "setattr", "delattr", "type", "vars", "dir"}
TABLES = ("POOLS", "SUPPORTED")


def members(protocol: type) -> set[str]:
    """What a protocol promises."""
    return {name for base in protocol.__mro__ for name in (*vars(base), *inspect.get_annotations(base))}


KNOWN = {"pool": members(CachePoolProtocol), "view": members(BatchView), "kv": members(KVView)}
"""Names that the memory goes by; a model calls it ``kv``, and a pool there is one of threads."""


def docstrings(tree: ast.Module) -> set[ast.AST]:
    bodies = [node.body for node in ast.walk(tree) if hasattr(node, "body") and isinstance(node.body, list)]
    lines = {line.value for body in bodies for line in body if isinstance(line, ast.Expr)}
    return {line for line in lines if isinstance(line, ast.Constant)}


def in_tables(tree: ast.Module) -> set[ast.AST]:
    """All of the tables, and of ``POOLS[config.kv_cache_backend or "…"]`` what stands in the brackets."""
    found: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id in TABLES for target in targets):
                found |= set(ast.walk(node))
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "POOLS":
            found |= set(ast.walk(node.slice))
    return found


def found_in(source: str, names: Collection[str] = tuple(KNOWN)) -> Iterator[str]:
    """What breaks the rule, a line each; ``names`` are those that the memory has there."""
    tree = ast.parse(source)
    memory = re.compile(rf"\b({'|'.join(names)})\b")
    allowed = in_tables(tree)
    unread = docstrings(tree)
    concrete = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shared.cache")
        for alias in node.names
        if node.module != "shared.cache.pool"
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
        if is_probe and any(memory.search(ast.unparse(argument)) for argument in node.args):
            yield f"{ast.unparse(node)} asks what the memory is"
        if isinstance(node, ast.Match) and memory.search(ast.unparse(node.subject)):
            yield f"match {ast.unparse(node.subject)} asks what the memory is"
        if isinstance(node, ast.Attribute):
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else ast.unparse(node.value)
            if owner in names and node.attr not in KNOWN[owner] - {"__class__", "__dict__"}:
                yield f"{ast.unparse(node)} is not in the protocol"


@pytest.mark.parametrize("path", [*ENGINES, *PARTS], ids=lambda path: str(path.relative_to(ROOT)))
def test_the_memory_is_known_by_its_protocol_alone(path: Path) -> None:
    names = ("kv",) if path.parent.name == "models" else tuple(KNOWN)
    assert list(found_in(path.read_text(encoding="utf-8"), names)) == []


@pytest.mark.parametrize("path", PARTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_engines_are_made_of_imports_no_pool(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert {name for name in modules if name.startswith("shared.cache")} <= {"shared.cache.pool"}


def test_there_are_files_to_read() -> None:
    names = {path.name for path in PARTS}
    assert {"scheduler.py", "preemption.py", "isolation.py", "llama.py", "batch.py"} <= names
    assert {path.parent.name for path in ENGINES} >= {"phase_04", "phase_05", "phase_06"}


@pytest.mark.parametrize(
    "source",
    [
        "if isinstance(self.pool, PagedKVCachePool): pass",
        "if type(scheduler.pool) is Pool: pass",
        "hasattr(pool, 'block_size')",
        "getattr(self.view, 'tables', None)",
        "self.pool.block_size",
        "pool.allocator.num_free",
        "kv.tables",
        "self.pool.__class__.__name__",
        "if config.kv_cache_backend == 'paged': pass",
        "name = 'PagedKVCachePool'",
        "backend = config.kv_cache_backend or 'contiguous'",
        "import shared.cache.paged",
        "from shared.cache.paged import PagedKVCachePool\npool = PagedKVCachePool(model)",
        "match self.pool:\n    case Pool(): pass",
    ],
)
def test_what_breaks_the_rule_is_found(source: str) -> None:
    assert list(found_in(source))


@pytest.mark.parametrize(
    "source",
    [
        "from shared.cache.paged import PagedKVCachePool\nPOOLS: dict = {'paged': PagedKVCachePool}",
        "SUPPORTED = {'kv_cache_backend=paged'}",
        "self.pool = POOLS[config.kv_cache_backend or 'paged'].for_engine(config, self.model, 8)",
        "self.pool.reserve(name, self.pool.free_tokens - self.pool.watermark_tokens)",
        "tokens, _ = self.view.prepare(batch)",
        "isinstance(prompt, str)",
        "keys.contiguous()",
        '"""Paged memory."""',
    ],
)
def test_what_keeps_it_is_not(source: str) -> None:
    assert not list(found_in(source))

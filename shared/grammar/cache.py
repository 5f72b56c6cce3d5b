"""Compiled grammars; each is compiled once, however many requests ask for it. Introduced in phase 12.

Compiling a grammar takes milliseconds, and may take a second. Requests with the same grammar share it: the first
compiles, and others wait for its result. Thread-safe.

Invariants: cached tables take at most the cache's size in bytes; errors are not cached.
"""

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock
from typing import Generic, TypeVar

from shared.grammar.grammar import Grammar

CACHE_BYTES = 256_000_000
MAX_GRAMMARS = 1000
Compiled = TypeVar("Compiled")


class GrammarCache(Generic[Compiled]):
    """Caches the most recently used grammars compiled by ``compile_grammar``, which raises GrammarError.
    ``num_bytes`` gives the size of a result.
    """

    def __init__(
        self,
        compile_grammar: Callable[[Grammar], Compiled],
        num_bytes: Callable[[Compiled], int],
        *,
        most_bytes: int = CACHE_BYTES,
    ) -> None:
        self.compile_grammar, self.num_bytes, self.most_bytes = compile_grammar, num_bytes, most_bytes
        self.num_compiled = 0
        self.used_bytes = 0
        self._kept: OrderedDict[Grammar, Compiled] = OrderedDict()
        self._running: dict[Grammar, Future[Compiled]] = {}
        self._lock = Lock()

    def known(self, grammar: Grammar) -> Compiled | None:
        """The compiled grammar, if it is cached; does not wait."""
        with self._lock:
            if grammar in self._kept:
                self._kept.move_to_end(grammar)
            return self._kept.get(grammar)

    def get(self, grammar: Grammar) -> Compiled:
        """The compiled grammar; waits if it is being compiled. Raises GrammarError."""
        # both are looked up together; otherwise a grammar that has just finished would be compiled and counted again
        with self._lock:
            if grammar in self._kept:
                self._kept.move_to_end(grammar)
                return self._kept[grammar]
            future = self._running.get(grammar)
            is_first = future is None
            if future is None:
                future = self._running[grammar] = Future()
        if is_first:
            self._compile(grammar, future)
        return future.result()

    def _compile(self, grammar: Grammar, future: Future[Compiled]) -> None:
        try:
            compiled = self.compile_grammar(grammar)
        except BaseException as error:
            with self._lock:
                del self._running[grammar]
            future.set_exception(error)
            return
        with self._lock:
            del self._running[grammar]
            self.num_compiled += 1
            self._kept[grammar] = compiled
            self.used_bytes += self.num_bytes(compiled)
            while len(self._kept) > 1 and (self.used_bytes > self.most_bytes or len(self._kept) > MAX_GRAMMARS):
                self.used_bytes -= self.num_bytes(self._kept.popitem(last=False)[1])
        future.set_result(compiled)

    def __len__(self) -> int:
        return len(self._kept)

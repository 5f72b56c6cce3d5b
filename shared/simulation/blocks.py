"""The KV cache of a simulated replica: blocks in use, and cached ones that no request uses. Follows phase 11.

Invariant: own, used and cached blocks together are at most ``num_blocks``; a block in use is never evicted.
"""

from collections import OrderedDict

from shared.simulation.arrivals import Request


class SimulatedBlocks:
    """Counts the requests' own blocks, and tracks all others by id."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.num_own = 0  # blocks of running requests that are not yet in a tree
        self.used: dict[int, int] = {}  # how many running requests use a block
        self.cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    def needed(self, request: Request) -> int:
        return -(-(request.prompt_tokens + request.new_tokens) // self.block_size)

    def admit(self, request: Request) -> bool:
        """Reserve blocks for prompt and answer, in addition to those that are cached; False if they do not fit."""
        shared = []
        for block in request.blocks[: request.prompt_tokens // self.block_size]:
            if block not in self.used and block not in self.cached:
                break
            shared.append(block)
        num_own, num_unused = self.needed(request) - len(shared), sum(block in self.cached for block in shared)
        if self.num_own + num_own + len(self.used) + num_unused > self.num_blocks:
            return False
        self._use(shared)
        request.num_shared, request.num_own = len(shared), num_own
        request.num_cached = min(len(shared) * self.block_size, request.prompt_tokens - 1)
        self.num_own += num_own
        while self.num_own + len(self.used) + len(self.cached) > self.num_blocks:
            self.cached.popitem(last=False)
        return True

    def enter(self, request: Request) -> None:
        """The prompt has been computed: its whole blocks become visible to other requests."""
        num_whole = request.prompt_tokens // self.block_size
        new = request.blocks[request.num_shared : num_whole]
        self._use(new)
        request.num_shared += len(new)
        request.num_own -= len(new)
        self.num_own -= len(new)

    def release(self, request: Request) -> None:
        """The answer is complete: its blocks are kept until their space is needed, and evicted last one first."""
        for block in reversed(request.blocks[request.num_shared :]):
            if block not in self.used:
                self.cached[block] = None
                self.cached.move_to_end(block)
        for block in reversed(request.blocks[: request.num_shared]):
            self.used[block] -= 1
            if not self.used[block]:
                del self.used[block]
                self.cached[block] = None
        self.num_own -= request.num_own
        while self.num_own + len(self.used) + len(self.cached) > self.num_blocks:
            self.cached.popitem(last=False)

    def _use(self, blocks: "list[int] | tuple[int, ...]") -> None:
        for block in blocks:
            self.used[block] = self.used.get(block, 0) + 1
            self.cached.pop(block, None)

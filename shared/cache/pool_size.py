"""How much memory is left for a pool of blocks: what is free, less what a step needs. Introduced in phase 6.

A pool shall have the memory that nothing else needs, and what a step needs beside it is not known from the model's
shape alone: operations keep inputs, outputs and scratch. So a step as large as any is run once and its peak measured,
as vLLM does. On a GPU PyTorch's allocator keeps count. On a CPU it does not: there the storages that a forward makes
are counted while they live. Invariant: what is measured is what the run adds; model and caches are not in it.
"""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from shared.cache.contiguous import kv_bytes
from shared.cache.pool import CachePoolProtocol
from shared.engine.batch import Batch
from shared.engine.config import EngineConfig
from shared.errors import ConfigError
from shared.models.causal_lm import CausalLM

CONTROL_GROUP = Path("/sys/fs/cgroup")
SHARE = {"cuda": 0.9, "cpu": 0.5}  # of the free memory; on a CPU other programs want some
MOST_ON_CPU = 64  # tokens of the step that is run there, which stands for a larger one


def num_blocks_that_fit(
    config: EngineConfig, model: CausalLM, max_seq_len: int, make: Callable[[int, int], CachePoolProtocol]
) -> int:
    """Blocks for which there is memory beside a step, but no more than ``max_batch_size`` sequences can fill.

    Args:
        make: makes a pool of so many blocks for so many sequences; the run's own is made by it.
    """
    most = min(max(config.max_num_batched_tokens, max_seq_len), config.max_batch_size * max_seq_len)
    block_bytes = kv_bytes(model.config, config.block_size, model.dtype)
    left = int(SHARE[model.device.type] * free_bytes(model.device)) - step_bytes(config, model, max_seq_len, most, make)
    useful = config.max_batch_size * -(-max_seq_len // config.block_size)
    return max(0, min(left // block_bytes, useful))


def step_bytes(
    config: EngineConfig,
    model: CausalLM,
    max_seq_len: int,
    num_tokens: int,
    make: Callable[[int, int], CachePoolProtocol],
) -> int:
    """What a step of so many prompt tokens holds beside model and pool, and the logits of a full batch.

    On a CPU, where such a step takes long, the figure is that of a few tokens times their share; what grows faster than
    their number, the scores of ``naive``, is not foreseen. Raises ConfigError if a GPU has no room for the step.
    """
    run_tokens = num_tokens if model.device.type == "cuda" else min(num_tokens, MOST_ON_CPU)
    lengths = np.diff(np.append(np.arange(0, run_tokens, max_seq_len), run_tokens))  # [B], each at most max_seq_len
    names = tuple(map(str, range(len(lengths))))
    ends = lengths.cumsum()
    positions = np.arange(run_tokens) % max_seq_len
    batch = Batch(names, np.zeros(run_tokens, np.int64), positions, lengths, ends - 1, ())
    pool = make(sum(-(-int(length) // config.block_size) for length in lengths), len(lengths))
    view = pool.view(model.config.num_heads, config.attention_backend)
    for name, length in zip(names, lengths.tolist(), strict=True):
        pool.reserve(name, length)

    def run() -> torch.Tensor:
        tokens, _ = view.prepare(batch)
        return model(tokens, view)

    try:
        with torch.inference_mode():
            in_blocks = peak_bytes(run, model.device)
            row = torch.zeros(1, model.config.hidden_size, dtype=model.dtype, device=model.device)
            rows = row.expand(config.max_batch_size, -1).contiguous()
            in_head = peak_bytes(lambda: model.logits(rows), model.device)
    except torch.OutOfMemoryError:
        raise ConfigError(
            f"A step of {num_tokens} tokens, the largest there may be, does not fit into the memory that "
            f"{torch.cuda.get_device_name(model.device)} has beside the model; lower max_num_batched_tokens = "
            f"{config.max_num_batched_tokens} or max_seq_len = {max_seq_len}."
        ) from None
    return in_blocks * num_tokens // run_tokens + in_head


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated there, what PyTorch keeps for reuse included."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min(psutil.virtual_memory().available, container_bytes())


def container_bytes(group: Path = CONTROL_GROUP) -> int:
    """Bytes that the process's container may still take, as its control group (version 2) says; 2^63 for no limit."""
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        used = int((group / "memory.current").read_text(encoding="ascii"))
        counts = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        # Pages of files that were only read are counted and given back as soon as somebody wants the memory.
        return 2**63 if limit == "max" else max(0, int(limit) - used + int(counts.get("inactive_file", 0)))
    except (OSError, ValueError):
        return 2**63


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """The most bytes that ``run`` holds at a time, beside what is held before it."""
    if device.type != "cuda":
        with LiveStorages() as storages:
            run()
        return storages.peak
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of tensors that operations make while it is on, from their making to their end."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.known: weakref.WeakSet[Any] = weakref.WeakSet()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch asks when the class is made. True, its answer, makes the first use import its compiler: seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for given in tree_iter((args, kwargs)):
            if isinstance(given, torch.Tensor):
                self.known.add(given.untyped_storage())  # made before, or counted
        made = func(*args, **(kwargs or {}))
        for tensor in tree_iter(made):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage not in self.known:
                    self.known.add(storage)
                    self.live += storage.nbytes()
                    weakref.finalize(storage, self._end, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return made

    def _end(self, num_bytes: int) -> None:
        self.live -= num_bytes

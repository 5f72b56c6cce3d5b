"""The number of blocks that fit: free memory minus the peak of a step. Introduced in phase 6.

The pool uses all memory that nothing else needs. A step's activations cannot be computed from the model's shape alone:
operations allocate inputs, outputs and scratch. So the largest possible step runs once and its peak memory is measured,
as in vLLM. On a GPU PyTorch's allocator records the peak. On a CPU it does not, so ``LiveStorages`` counts the storages
of the forward while they are alive. Invariant: the measured peak excludes the model and the caches.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from shared.cache.free_memory import free_bytes
from shared.cache.layout.paged import PagedSizes
from shared.cache.pool.paged import PagedKVCachePool
from shared.cache.view.contiguous import kv_bytes
from shared.cache.view.interface import BatchView
from shared.engine.batch import Batch
from shared.engine.config import EngineConfig
from shared.engine.request import Request
from shared.errors import ConfigError
from shared.loading.config_json import read_config
from shared.loading.resolve import resolve_model
from shared.models.causal_lm import CausalLM
from shared.sampling.params import SamplingParams
from shared.scheduling.schedule import Schedule, Scheduled

SHARE = {"cuda": 0.9, "cpu": 0.5}  # share of free memory; on a CPU, more is left to other programs
MOST_ON_CPU = 64  # tokens of the step that is measured on a CPU and extrapolated
MakePaged = Callable[[PagedSizes], tuple[PagedKVCachePool, BatchView]]


def num_blocks_that_fit(config: EngineConfig, model: CausalLM, max_seq_len: int, make: MakePaged) -> int:
    """Blocks that fit in memory together with a step, capped at what ``max_batch_size`` sequences can fill.

    Args:
        make: makes the pool and the view of the measured step.
    """
    free = int(SHARE[model.device.type] * free_bytes(model.device))
    before = allocated_bytes(model.device)
    num_tokens = config.most_tokens_of_a_step(max_seq_len)
    pool, view, requests = measured_memory(config, model, max_seq_len, num_tokens, make)
    workspace = max(0, allocated_bytes(model.device) - before - view.num_bytes)  # the engine's view allocates it too
    caches = [model.config]
    if config.draft_model is not None:  # with the same number of blocks
        caches.append(read_config(resolve_model(config.draft_model), can_quantize=True))
    numbers = sum([kv_bytes(cache, config.block_size, torch.uint8) for cache in caches])
    block_bytes = -(-view.num_bytes * numbers // kv_bytes(model.config, pool.capacity_tokens, torch.uint8))
    left = free - workspace - step_bytes(config, model, num_tokens, pool, view, requests)
    useful = config.max_batch_size * -(-max_seq_len // config.block_size)
    return max(0, min(left // block_bytes, useful))


def allocated_bytes(device: torch.device) -> int:
    """Bytes of tensors on a GPU; 0 on a CPU, which does not count them."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def measured_memory(
    config: EngineConfig, model: CausalLM, max_seq_len: int, num_tokens: int, make: MakePaged
) -> tuple[PagedKVCachePool, BatchView, list[Request]]:
    """A pool and a view for the step that is measured, and its prompts: ``num_tokens`` in all, fewer on a CPU."""
    run_tokens = num_tokens if model.device.type == "cuda" else min(num_tokens, MOST_ON_CPU)
    lengths = [min(max_seq_len, run_tokens - start) for start in range(0, run_tokens, max_seq_len)]
    num_blocks = sum(-(-length // config.block_size) for length in lengths)
    pool, view = make(PagedSizes(num_blocks, config.block_size, len(lengths), run_tokens, max_seq_len))
    requests = [Request(str(n), [0] * length, SamplingParams(), 0) for n, length in enumerate(lengths)]
    for request in requests:
        pool.admit(request)
        pool.reserve(request, request.num_tokens)
    return pool, view, requests


def step_bytes(
    config: EngineConfig,
    model: CausalLM,
    num_tokens: int,
    pool: PagedKVCachePool,
    view: BatchView,
    requests: list[Request],
) -> int:
    """Peak bytes of a step of ``num_tokens`` prompt tokens plus the logits of a full batch, without the model and the
    pool.

    With drafts each sequence of the batch has as many logit rows as ``config`` grants it, one for each token.

    On a CPU, where such a step is slow, the peak is extrapolated linearly from a few tokens; the scores of ``naive``,
    which grow faster, are underestimated. Raises ConfigError if the step does not fit on a GPU.
    """
    schedule = Schedule(0, tuple(Scheduled(request, 0, request.num_tokens) for request in requests))
    batch = Batch.of(schedule, pool)

    def run() -> Tensor:
        return model(view.load(batch).tokens, view)

    try:
        with torch.inference_mode():
            in_blocks = peak_bytes(run, model.device)
            row = torch.zeros(1, model.config.hidden_size, dtype=model.dtype, device=model.device)
            rows = row.expand(min(config.max_batch_size * config.most_logit_rows, num_tokens), -1).contiguous()
            in_head = peak_bytes(lambda: model.logits(rows), model.device)
    except torch.OutOfMemoryError:
        raise ConfigError(
            f"A step of {num_tokens} tokens, the largest possible, does not fit into the memory that the model leaves "
            f"on {torch.cuda.get_device_name(model.device)}; lower max_num_batched_tokens = "
            f"{config.max_num_batched_tokens} or max_seq_len = {config.sequence_limit(model.max_positions)}."
        ) from None
    return in_blocks * num_tokens // batch.num_tokens + in_head


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Peak bytes that ``run`` allocates in addition to those allocated before it."""
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
    """Counts the bytes of tensors that operations allocate while the mode is active, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.known: weakref.WeakSet[Any] = weakref.WeakSet()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch calls this when the class is made. Its default, True, imports the compiler at first use, which takes
        seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for given in tree_iter((args, kwargs)):
            if isinstance(given, Tensor):
                self.known.add(given.untyped_storage())  # allocated before, or already counted
        made = func(*args, **(kwargs or {}))
        for tensor in tree_iter(made):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage not in self.known:
                    self.known.add(storage)
                    self.live += storage.nbytes()
                    weakref.finalize(storage, self._end, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return made

    def _end(self, num_bytes: int) -> None:
        self.live -= num_bytes

"""The ranks of an engine: one process each, started and stopped by rank 0. Introduced in phase 12.1.

The engine's process is rank 0. It starts the others. Each makes the same model, memory and runner as the engine, for
its own shard (:mod:`shared.tracks.ranks.worker`). With one rank there is no other process, and nothing differs from an
engine without ranks.

Invariants: all ranks have KV caches of the same size; the other ranks end when the group is closed, fails or is
garbage-collected, and when rank 0 ends for any reason.
"""

import math
import os
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shared.cache.pool.interface import CachePoolProtocol
from shared.cache.view.interface import BatchView, MakeMemory
from shared.child_process import start_child
from shared.engine.config import EngineConfig
from shared.engine.runner import MakeRunner, Runner
from shared.engine.sampling.sampler import SampledTokens, SamplerOutput
from shared.errors import ConfigError, RankError
from shared.loading.config_json import read_config
from shared.loading.cpu_threads import most_threads
from shared.loading.loader import load_model
from shared.loading.placement import check_device
from shared.loading.quantized import quantizer
from shared.models.causal_lm import CausalLM
from shared.tracks.ranks.channel import CALLS, Board, Sender
from shared.tracks.ranks.collectives import Collectives
from shared.tracks.ranks.model import load_part
from shared.tracks.ranks.model_shard import WatchedCheckpoint
from shared.tracks.ranks.several_ranks import SeveralRanks
from shared.tracks.ranks.shard import Shard
from shared.tracks.ranks.watch import Watch

START = "from shared.tracks.ranks.worker import main; main()"
START_SECONDS = 120
"""Seconds within which all ranks must have imported PyTorch and have their devices. From then on each counts
heartbeats."""


@dataclass(frozen=True)
class Assignment:
    """What a rank receives when it starts."""

    rank: int
    config: EngineConfig
    folder: Path
    port: int  # address of the store where the ranks meet
    num_threads: int  # on a CPU
    make_memory: MakeMemory
    make_runner: MakeRunner


class Group:
    """Rank 0, and the processes of the other ranks.

    Raises ConfigError if the model or the machine cannot be shared by ``config.tensor_parallel_size`` ranks.
    """

    def __init__(self, config: EngineConfig, folder: Path, make_memory: MakeMemory, make_runner: MakeRunner) -> None:
        self.config, self.folder, self.size = config, folder, config.tensor_parallel_size
        self.make_memory, self.make_runner = make_memory, make_runner
        self.watch: Watch | None = None
        if self.size == 1:
            return
        Shard(0, self.size).heads(read_config(folder, can_quantize=True))
        device = rank_device(config, 0)
        if device.type == "cuda" and torch.cuda.device_count() - (device.index or 0) < self.size:
            raise ConfigError(
                f"tensor_parallel_size is {self.size} and this machine has {torch.cuda.device_count()} GPUs, counted "
                f"from {device}; choose at most that many."
            )
        store = self.store = local_store()
        num_threads = max(1, most_threads() // self.size)
        self.board = Board(self.size)
        lifeline, self._lifeline = os.pipe()
        processes, pipes = [], []
        for rank in range(1, self.size):
            pipe, theirs = Pipe()
            passed = (theirs.fileno(), self.board.fd, lifeline)
            processes.append(start_child(START, passed))
            theirs.close()
            arguments = (rank, config, folder, store.port, num_threads, make_memory, make_runner)
            pipe.send((self.size, Assignment(*arguments)))
            pipes.append(pipe)
        os.close(lifeline)
        os.close(self.board.fd)  # its memory stays
        self.watch = Watch(self.board, processes, pipes)
        weakref.finalize(self, _end, self.watch, self._lifeline, most_threads())
        if device.type == "cpu":
            torch.set_num_threads(num_threads)
        with self._starting():
            torch.zeros(1, device=device)  # creating a GPU's context takes seconds
            self.sender = Sender(self.board, pipes, self.watch.check)
            self._meet(store)
            count, is_shared = partial(count_call, self.board, 0), config.all_reduce_backend != "nccl"
            self.ranks = Collectives(store, 0, self.size, device, count, self.watch.waiting, is_shared)
            self.watch.collectives.append(self.ranks)

    def load(self) -> CausalLM:
        """The model, or rank 0's shard of it."""
        config = self.config
        if self.watch is None:
            quantize = quantizer(config.quantization, config.quantize_head)
            return load_model(self.folder, dtype=config.torch_dtype, device=config.device, quantize=quantize)
        with self._starting():
            return load_rank(config, self.folder, self.ranks, self.watch.check)

    def memory(self, model: CausalLM, max_seq_len: int) -> tuple[CachePoolProtocol, BatchView]:
        """The pool, and the view of rank 0's shard."""
        if self.size == 1:
            return self.make_memory(self.config, model, max_seq_len)
        with self._starting():
            return agreed_memory(self.config, model, max_seq_len, self.make_memory, self.ranks)

    def runner(self, model: CausalLM, *args: Any, **options: Any) -> Runner:
        """The runner; arguments as for :class:`shared.engine.runner.Runner`."""
        if self.watch is None:
            return self.make_runner(model, *args, **options)
        with self._starting():
            ranks = SeveralRanks(model.config.vocab_size, self.ranks, self.sender, self.watch)
            return self.make_runner(model, *args, **options, ranks=ranks)

    def load_draft(self, folder: Path, **options: Any) -> CausalLM:
        """A draft model, or rank 0's shard of it; arguments as for ``load_model``."""
        if self.watch is None:
            return load_model(folder, **options)
        with self._starting():
            if self.config.draft_ranks == 1:
                watched = partial(WatchedCheckpoint, check=self.watch.check)
                return load_model(folder, **options, open_checkpoint=watched)
            self.drafting = draft_collectives(self.config, self.store, self.ranks)
            self.watch.collectives.append(self.drafting)
            return load_part(folder, self.drafting, dtype=options["dtype"], check=self.watch.check)

    def draft_runner(self, model: CausalLM, *args: Any, **options: Any) -> Runner:
        """The runner of the draft model; arguments as for :class:`shared.engine.runner.Runner`."""
        is_whole = self.config.draft_ranks == 1
        if self.watch is None or (is_whole and not self.config.draft_on_each_rank):
            return self.make_runner(model, *args, **options)
        with self._starting():
            drafting = self.ranks if is_whole else self.drafting
            sizes = (model.config.vocab_size, drafting, self.sender, self.watch)
            return self.make_runner(model, *args, **options, ranks=SeveralRanks(*sizes, number=1, is_whole=is_whole))

    def wait(self, sampled: SamplerOutput) -> SampledTokens:
        """The sampled tokens; raises RankError if the group fails before they arrive."""
        if self.watch is None:
            return sampled.wait()
        with self.watch.waiting():
            return sampled.wait()

    def when_lost(self, tell: Callable[[RankError], None]) -> None:
        """Call ``tell``, on a thread of the group, when a rank is lost, even if the engine has no work."""
        if self.watch is not None:
            self.watch.when_lost = tell

    def close(self) -> None:
        """End the other ranks."""
        if self.watch is not None:
            self.watch.close()

    def _meet(self, store: dist.Store) -> None:
        """Wait until all ranks have joined the store."""
        assert self.watch is not None
        deadline = time.monotonic() + START_SECONDS
        while missing := [rank for rank in range(1, self.size) if not store.check([here(rank)])]:
            self.watch.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {missing[0]} of {self.size} did not start within {START_SECONDS} s")
            time.sleep(0.01)

    @contextmanager
    def _starting(self) -> Iterator[None]:
        """End the group if the work within fails, or if a rank is lost meanwhile."""
        assert self.watch is not None
        try:
            with self.watch.waiting(math.inf):  # loading has no time limit
                yield
        except ConfigError:
            self.close()
            raise
        except BaseException as error:
            raise self.watch.failed(error) from error


def here(rank: int) -> str:
    """What a rank sets in the store once it has started."""
    return f"rank {rank}"


def local_store() -> dist.TCPStore:
    """A store where the ranks meet, which listens only on the loopback interface."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port, timeout = listener.getsockname()[1], timedelta(seconds=START_SECONDS)
        return dist.TCPStore("127.0.0.1", port, is_master=True, timeout=timeout, master_listen_fd=listener.detach())


def rank_device(config: EngineConfig, rank: int) -> torch.device:
    """The device of a rank: GPUs are counted from the one that the config names."""
    device = check_device(config.device)
    return torch.device("cuda", (device.index or 0) + rank) if device.type == "cuda" else device


def load_rank(
    config: EngineConfig, folder: Path, ranks: Collectives, check: Callable[[], None] = lambda: None
) -> CausalLM:
    """A rank's shard of the model; ``check`` as for ``load_part``."""
    return load_part(
        folder, ranks, dtype=config.torch_dtype, quantization=config.quantization,
        quantize_head=config.quantize_head, check=check,
    )  # fmt: skip


def draft_collectives(config: EngineConfig, store: dist.Store, ranks: Collectives) -> Collectives:
    """The collectives of the first ``draft_ranks`` ranks, including this one. These ranks rendezvous again unless they
    are all ranks."""
    if config.draft_ranks == ranks.size:
        return ranks
    arguments = ranks.rank, config.draft_ranks, ranks.device, ranks.count, ranks.waiting
    return Collectives(dist.PrefixStore("draft", store), *arguments, config.all_reduce_backend != "nccl")


def agreed_memory(
    config: EngineConfig, model: CausalLM, max_seq_len: int, make_memory: MakeMemory, ranks: Collectives
) -> tuple[CachePoolProtocol, BatchView]:
    """A rank's memory, with as many blocks as fit on every rank."""
    pool, view = make_memory(config, model, max_seq_len)
    if config.num_gpu_blocks is not None or config.kv_cache_backend == "contiguous":  # equal on all ranks
        return pool, view
    capacity = pool.capacity_tokens
    agreed = ranks.least(capacity)
    useful = config.max_batch_size * -(-max_seq_len // config.block_size) * config.block_size
    if ranks.device.type == "cpu" and agreed < useful:
        agreed //= ranks.size  # all of them measured the same memory
    if agreed < capacity:
        del pool, view
        pool, view = make_memory(replace(config, num_gpu_blocks=agreed // config.block_size), model, max_seq_len)
    return pool, view


def count_call(board: Board, rank: int) -> None:
    """Count the start or end of one of a rank's collectives."""
    board.counters[rank, CALLS] += 1


def _end(watch: Watch, lifeline: int, num_threads: int) -> None:
    watch.close()
    os.close(lifeline)
    torch.set_num_threads(num_threads)

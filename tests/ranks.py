"""Ranks as threads of one process: collectives through gloo, without the seconds that processes take to start."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from filelock import FileLock

from shared.checkpoints.make import make_checkpoint
from shared.engine.config import EngineConfig
from shared.tracks.ranks.collectives import Collectives

R = TypeVar("R")
FAMILIES = ("llama", "qwen3", "gemma3")


def on_ranks(size: int, run: Callable[[Collectives], R]) -> list[R]:
    """The results of ``run`` on each rank."""
    store = dist.HashStore()

    def on_rank(rank: int) -> Collectives:
        return Collectives(store, rank, size, torch.device("cpu"))

    def running(ranks: Collectives) -> R:
        with torch.inference_mode():
            return run(ranks)

    with ThreadPoolExecutor(size) as pool:
        connected = list(pool.map(on_rank, range(size)))  # none closes its connections while another still connects
        return list(pool.map(running, connected))


def checkpoint_for_ranks(family: str, folder: Path) -> Path:
    """A random checkpoint of a family whose heads 2 and 4 ranks can share; made once in ``folder``."""
    shape = f"tiny-{family}-ranks"
    with FileLock(folder / f"{shape}.lock"):
        return make_checkpoint(shape, folder / shape, seed=1)


class LosingConfig(EngineConfig):
    """Settings with which the other ranks are lost: they do ``lose()`` when they read the setting ``where``."""

    def losing(self, where: str, lose: Callable[[], object]) -> Self:
        vars(self)["lost"] = where, lose, os.getpid()
        return self

    def __getattribute__(self, name: str) -> Any:
        where, lose, of_rank_0 = super().__getattribute__("__dict__").get("lost", (None, None, None))
        if name == where and os.getpid() != of_rank_0:
            lose()
        return super().__getattribute__(name)


class Poison:
    """A message that runs out of memory when a rank computes it."""

    @property
    def layout(self) -> None:
        """What a view reads first."""
        raise MemoryError("12 GB are too many")

"""What every benchmark of a model begins and ends with: checked options, and the report. Introduced in phase 3."""

import ctypes
import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.report import Report, describe_model, engine_settings
from benchmarks.roofline import DecodeWork
from benchmarks.timing import Steps, torch_threads
from shared.checkpoints.progress import Progress
from shared.engine.config import EngineConfig
from shared.errors import CapacityError, ConfigError, RequestError
from shared.loading.config_json import read_config
from shared.loading.cpu_threads import most_threads
from shared.loading.placement import check_device, default_dtype
from shared.loading.resolve import resolve_model
from shared.models.config import ModelConfig


def check_least(**bounds: tuple[float | None, float]) -> None:
    """Raise ConfigError for an option below its minimum; None is an omitted option."""
    for name, (value, least) in bounds.items():
        if value is not None and not value >= least:
            raise ConfigError(f"{name} is {value}; it must be at least {least}.")


def check_positive(**values: float | None) -> None:
    """Raise ConfigError for an option that is not above 0; None is an omitted option."""
    for name, value in values.items():
        if value is not None and not value > 0:
            raise ConfigError(f"{name} is {value}; it must be positive.")


def free_memory() -> None:
    """Return the memory of unreferenced objects to the system, even if the C library keeps it for later."""
    gc.unfreeze()
    gc.collect()
    torch.cuda.empty_cache()  # does nothing if no GPU was used
    getattr(ctypes.CDLL(None), "malloc_trim", int)(0)


def freeze_memory() -> None:
    """Garbage collections skip existing objects until ``free_memory``, as in the server: a full one takes up to 0.1
    s."""
    gc.collect()
    gc.freeze()


@dataclass(frozen=True)
class Setup:
    """The model, where it runs, and what makes a run reproducible; ``threads`` is PyTorch's number of threads on a CPU
    during :meth:`running`. Raises ConfigError or ModelFolderError.
    """

    model: str
    device: str = "cpu"
    dtype: str | None = None
    threads: int | None = None
    seed: int = 0
    progress: Progress | None = None

    def __post_init__(self) -> None:
        check_least(seed=(self.seed, 0), threads=(self.threads, 1))
        _ = self.target, self.shape  # each is checked on first use

    @cached_property
    def target(self) -> torch.device:
        return check_device(self.device)

    @property
    def is_gpu(self) -> bool:
        return self.target.type == "cuda"

    @cached_property
    def folder(self) -> Path:
        return resolve_model(self.model)

    @cached_property
    def shape(self) -> ModelConfig:
        return read_config(self.folder)

    @cached_property
    def work(self) -> DecodeWork:
        """What a decode step must read and compute, in the run's dtype."""
        return DecodeWork(self.shape, self.config().torch_dtype or default_dtype(self.shape, self.target))

    def config(self, **settings: Any) -> EngineConfig:
        """The run's engine configuration, with further settings."""
        return EngineConfig(model=str(self.folder), dtype=self.dtype, device=self.device, **settings)

    def check_length(self, num_tokens: int, what: str) -> None:
        """Raise RequestError if the model cannot hold a request of ``num_tokens``; the error calls it ``what``."""
        limit = self.shape.max_position_embeddings
        if num_tokens > limit:
            raise RequestError(
                f"{what} make {num_tokens} tokens; this model holds {limit} tokens of prompt and answer together, so "
                "ask for less."
            )

    def check_memory(self, num_engines: int, hint: str, kv_bytes: int = 0) -> None:
        """Raise CapacityError if the engines, each with its own weights, do not fit; ``hint``: what to omit."""
        needed = num_engines * self.work.resident_bytes + kv_bytes
        free = torch.cuda.mem_get_info(self.target)[0] if self.is_gpu else psutil.virtual_memory().available
        if needed > free:
            what = "The engine needs" if num_engines == 1 else f"{num_engines} engines with their own weights need"
            raise CapacityError(
                f"{what} {needed / 2**30:.1f} GiB and {free / 2**30:.1f} "
                f"GiB are free; {hint}, or take a smaller model or dtype."
            )

    @contextmanager
    def running(self, num_steps: int) -> Iterator[Steps]:
        """The run itself, with its number of threads; steps are counted for the progress display."""
        with torch_threads(self.threads):
            yield Steps(self.progress, num_steps)

    def settings(self, config: EngineConfig) -> dict[str, Any]:
        """A configuration in the form used in reports."""
        return engine_settings(config, describe_model(self.model)["name"])

    def report(
        self,
        name: str,
        engines: Mapping[str, EngineConfig | dict[str, Any]],
        flags: Mapping[str, Any],
        results: dict[str, Any],
    ) -> Report:
        """The report; make it during :meth:`running`, since it states how many threads computed. ``engines`` are
        configurations or, for engines that are not ours, their settings.
        """
        settings = {
            key: config if isinstance(config, dict) else self.settings(config) for key, config in engines.items()
        }
        common = {
            "dtype": str(self.work.dtype).removeprefix("torch."),
            "device": self.device,
            "threads": most_threads(),
            "is_demo_size": not self.is_gpu,
        }
        return Report(name, describe_model(self.model), settings, self.seed, dict(flags) | common, results, self.device)

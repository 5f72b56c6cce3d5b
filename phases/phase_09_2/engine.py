"""The loop for many requests, which compresses the KV cache of long ones between two steps."""

from functools import partial

import torch

from shared.cache.contiguous_memory import contiguous_memory
from shared.cache.view.interface import MakeMemory
from shared.engine import supported
from shared.engine.batch import Batch
from shared.engine.config import EngineConfig
from shared.engine.executor.captured import Captured
from shared.engine.executor.eager import Eager
from shared.engine.executor.last_ids import LastIds
from shared.engine.output import StepOutput
from shared.engine.request import Request
from shared.engine.runner import Runner
from shared.engine.sampling.sampler import SamplerOutput
from shared.engine.serving import ServingEngine
from shared.kernels.launch import LAUNCHES
from shared.loading.loader import load_model
from shared.loading.resolve import resolve_model
from shared.models.fused import fuse
from shared.models.packed import pack
from shared.scheduling.schedule import Schedule
from shared.scheduling.scheduler import Scheduler
from shared.scheduling.static import StaticScheduler
from shared.text.tokenizer import Tokenizer
from shared.tracks.compression.interface import compress, select
from shared.tracks.compression.memory import condensed_memory
from shared.tracks.compression.scheduler import CompressingScheduler

SUPPORTED = supported.COMPRESSION
MEMORY: dict[str, MakeMemory] = {"contiguous": contiguous_memory, "paged": condensed_memory}
SCHEDULERS: dict[str, type[Scheduler]] = {"static": StaticScheduler, "continuous": CompressingScheduler}


class Engine(ServingEngine):
    """Serves many requests at a time, each with a KV cache that its heads compress separately."""

    in_flight: tuple[Schedule, SamplerOutput] | None = None  # launched, but not committed yet

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """One iteration: schedule and launch a step, then finish the step before it, while this one runs.

        Without ``overlap_scheduling`` the launched step itself is finished.
        """
        try:
            self.compress()
            schedule = self.scheduler.schedule()
            launched = self.runner.forward(Batch.of(schedule, self.pool)) if schedule else None
            self.finish()
            if launched is not None:
                self.in_flight = schedule, self.runner.sample(launched, schedule.sampling_rows())
            if not self.overlaps:
                self.finish()
        except BaseException:
            self.in_flight = None
            self.recover()
            raise
        return self.report(schedule)

    def compress(self) -> None:
        """Compress the requests that are due; an interrupted one is preempted, since its cache may be inconsistent.

        For requests that will be due when the step in flight finishes, the device begins right after that step.
        """
        scheduler = self.scheduler
        if not isinstance(scheduler, CompressingScheduler):
            return
        for request in scheduler.due():
            try:
                kept, num_freed = compress(self.pool, self.view, request, self.free_memory)
            except BaseException:
                scheduler.preempt(request)
                raise
            scheduler.compressed(request, kept, num_freed)
            self.num_compressions += kept is not None
            self.num_freed_blocks += num_freed
        select(self.pool, self.view, scheduler.arriving())

    def free_memory(self, request: Request) -> bool:
        """Preempt a request to make space for compressing another; False if it is the same request."""
        self.finish()
        assert isinstance(self.scheduler, CompressingScheduler)
        return self.scheduler.free_memory(request)

    def finish(self) -> None:
        """Wait for the tokens of the step in flight, commit them, and make their outputs."""
        if self.in_flight is not None:
            schedule, sampled = self.in_flight
            self.scheduler.commit(schedule, sampled.wait())
            self.scheduler.finish(self.output_processor.process(schedule))
            self.in_flight = None

    def __init__(self, config: EngineConfig) -> None:
        config.check(SUPPORTED)
        super().__init__(config)
        folder = resolve_model(config.model)
        self.model = load_model(folder, dtype=config.torch_dtype, device=config.device)
        (pack if config.pack_weights else fuse)(self.model)
        self.tokenizer = Tokenizer.load(folder)
        config = self.fitted(config)
        is_capturing = config.is_on("use_cuda_graphs") and self.model.device.type == "cuda"
        make_runner = partial(Runner, executor=Captured if is_capturing else Eager, last_ids=LastIds)
        make_memory = MEMORY[config.kv_cache_backend or "paged"]
        self.pool, self.view = make_memory(config, self.model, self.max_seq_len)
        self.scheduler = SCHEDULERS[config.batching_mode or "continuous"](config, self.pool, self.max_seq_len)
        self.runner = make_runner(self.model, self.view, self.pool.max_sequences)
        self.overlaps = is_capturing if config.overlap_scheduling is None else config.overlap_scheduling
        self.num_compressions = self.num_freed_blocks = 0

    def stats(self) -> dict[str, int]:
        """Counters for ``infer generate --stats``."""
        return {
            **self.runner.stats(),
            "CUDA graph replays": self.runner.num_replays,
            "cache capacity (tokens)": self.pool.capacity_tokens,
            "cache bytes": self.view.num_bytes,
            **self.scheduler.stats(),
            "kernels launched": LAUNCHES.total(),
            "compressions": self.num_compressions,
            "blocks freed by compressions": self.num_freed_blocks,
        }

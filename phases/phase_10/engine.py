"""The loop for many requests, launched while the previous one runs, on weights of 16, 8 or 4 bits."""

from functools import partial

import torch

from shared.cache.contiguous_memory import contiguous_memory
from shared.cache.paged_memory import PagedMemory
from shared.cache.pool.prefix import prefix_sharing
from shared.cache.view.bucket_padding import bucket_attention
from shared.cache.view.interface import MakeMemory
from shared.cache.view.storages import STORAGES
from shared.engine import supported
from shared.engine.batch import Batch
from shared.engine.config import EngineConfig
from shared.engine.executor.captured import Captured
from shared.engine.executor.eager import Eager
from shared.engine.executor.last_ids import LastIds
from shared.engine.output import StepOutput
from shared.engine.runner import Runner
from shared.engine.sampling.sampler import SamplerOutput
from shared.engine.serving import ServingEngine
from shared.kernels.launch import LAUNCHES
from shared.loading.loader import load_model
from shared.loading.quantized import quantizer
from shared.loading.resolve import resolve_model
from shared.models.fused import fuse
from shared.models.packed import pack
from shared.scheduling.overlapped import OverlappedScheduler
from shared.scheduling.schedule import Schedule
from shared.scheduling.scheduler import Scheduler
from shared.scheduling.static import StaticScheduler
from shared.text.tokenizer import Tokenizer

SUPPORTED = supported.QUANTIZATION
PAGED = PagedMemory(bucket_attention, prefix_sharing, STORAGES)
MEMORY: dict[str, MakeMemory] = {"contiguous": contiguous_memory, "paged": PAGED}
SCHEDULERS: dict[str, type[Scheduler]] = {"static": StaticScheduler, "continuous": OverlappedScheduler}


class Engine(ServingEngine):
    """Serves many requests at a time with a model whose weights may be quantized."""

    in_flight: tuple[Schedule, SamplerOutput] | None = None  # launched, but not committed yet

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """One iteration: schedule and launch a step, then finish the step before it, while this one runs.

        Without ``overlap_scheduling`` the launched step itself is finished.
        """
        try:
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
        quantize = quantizer(config.quantization, config.quantize_head)
        self.model = load_model(folder, dtype=config.torch_dtype, device=config.device, quantize=quantize)
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

    def stats(self) -> dict[str, int]:
        """Counters for ``infer generate --stats``."""
        return {
            **self.runner.stats(),
            "CUDA graph replays": self.runner.num_replays,
            "cache capacity (tokens)": self.pool.capacity_tokens,
            "cache bytes": self.view.num_bytes,
            **self.scheduler.stats(),
            "kernels launched": LAUNCHES.total(),
        }

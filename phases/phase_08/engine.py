"""The loop for many requests, with one forward a step, which skips the tokens of cached prefixes."""

import torch

from shared.cache.contiguous_memory import contiguous_memory
from shared.cache.paged_memory import PagedMemory
from shared.cache.pool.prefix import prefix_sharing
from shared.cache.view.interface import MakeMemory
from shared.cache.view.planned_attention import planned_attention
from shared.engine import supported
from shared.engine.batch import Batch
from shared.engine.config import EngineConfig
from shared.engine.output import StepOutput
from shared.engine.runner import Runner
from shared.engine.sampling.sampler import SamplerOutput
from shared.engine.serving import ServingEngine
from shared.kernels.launch import LAUNCHES
from shared.loading.loader import load_model
from shared.loading.resolve import resolve_model
from shared.models.fused import fuse
from shared.models.packed import pack
from shared.scheduling.prefix import PrefixScheduler
from shared.scheduling.schedule import Schedule
from shared.scheduling.scheduler import Scheduler
from shared.scheduling.static import StaticScheduler
from shared.text.tokenizer import Tokenizer

SUPPORTED = supported.PREFIX_CACHING
PAGED = PagedMemory(planned_attention, prefix_sharing)
MEMORY: dict[str, MakeMemory] = {"contiguous": contiguous_memory, "paged": PAGED}
SCHEDULERS: dict[str, type[Scheduler]] = {"static": StaticScheduler, "continuous": PrefixScheduler}


class Engine(ServingEngine):
    """Serves many requests at a time from a paged KV cache that computes common prefixes once."""

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """One iteration: schedule, run one token of each decoding request and chunks of prompts in one forward."""
        try:
            schedule = self.scheduler.schedule()
            sampled = self.forward(schedule)
            self.finish(schedule, sampled)
        except BaseException:
            self.recover()
            raise
        return self.report(schedule)

    def forward(self, part: Schedule) -> SamplerOutput:
        """Launch a part of a step as one batch, without waiting; its results are valid after ``finish``."""
        if not part:
            return SamplerOutput(())
        launched = self.runner.forward(Batch.of(part, self.pool))
        return self.runner.sample(launched, part.sampling_rows())

    def finish(self, part: Schedule, sampled: SamplerOutput) -> None:
        """Wait for the tokens of a part of a step, commit them, and make their outputs."""
        self.scheduler.commit(part, sampled.wait())
        self.scheduler.finish(self.output_processor.process(part))

    def __init__(self, config: EngineConfig) -> None:
        config.check(SUPPORTED)
        super().__init__(config)
        folder = resolve_model(config.model)
        self.model = load_model(folder, dtype=config.torch_dtype, device=config.device)
        (pack if config.pack_weights else fuse)(self.model)
        self.tokenizer = Tokenizer.load(folder)
        config = self.fitted(config)
        make_memory = MEMORY[config.kv_cache_backend or "paged"]
        self.pool, self.view = make_memory(config, self.model, self.max_seq_len)
        self.scheduler = SCHEDULERS[config.batching_mode or "continuous"](config, self.pool, self.max_seq_len)
        self.runner = Runner(self.model, self.view, self.pool.max_sequences)

    def stats(self) -> dict[str, int]:
        """Counters for ``infer generate --stats``."""
        return {
            **self.runner.stats(),
            "cache capacity (tokens)": self.pool.capacity_tokens,
            "cache bytes": self.view.num_bytes,
            **self.scheduler.stats(),
            "kernels launched": LAUNCHES.total(),
        }

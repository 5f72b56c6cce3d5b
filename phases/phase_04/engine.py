"""The loop for many requests: a step prefills admitted prompts and runs one token of each decoding request."""

import torch

from shared.cache.contiguous_memory import contiguous_memory
from shared.cache.view.interface import MakeMemory
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
from shared.scheduling.schedule import Schedule
from shared.scheduling.scheduler import Scheduler
from shared.scheduling.static import StaticScheduler
from shared.text.tokenizer import Tokenizer

SUPPORTED = supported.BATCHES
MEMORY: dict[str, MakeMemory] = {"contiguous": contiguous_memory}
SCHEDULERS: dict[str, type[Scheduler]] = {"static": StaticScheduler}


class Engine(ServingEngine):
    """Serves many requests at a time, one static batch after another."""

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """One iteration: schedule, prefill the new prompts, run one token of each decoding request."""
        try:
            schedule = self.scheduler.schedule()
            prompts, decoding = schedule.prompts, schedule.decoding
            prefilled = self.prefill(prompts)
            decoded = self.decode(decoding)  # launch both forwards before waiting for tokens of the first
            self.finish(prompts, prefilled)
            self.finish(decoding, decoded)
        except BaseException:
            self.recover()
            raise
        return self.report(schedule)

    def prefill(self, prompts: Schedule) -> SamplerOutput:
        """Run whole prompts, laid end to end, and sample the next token of each."""
        return self.forward(prompts)

    def decode(self, decoding: Schedule) -> SamplerOutput:
        """Run the last token of each sequence and sample the next."""
        return self.forward(decoding)

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
        make_memory = MEMORY[config.kv_cache_backend or "contiguous"]
        self.pool, self.view = make_memory(config, self.model, self.max_seq_len)
        self.scheduler = SCHEDULERS[config.batching_mode or "static"](config, self.pool, self.max_seq_len)
        self.runner = Runner(self.model, self.view, self.pool.max_sequences)

    def stats(self) -> dict[str, int]:
        """Counters for ``infer generate --stats``."""
        return {
            **self.runner.stats(),
            "cache capacity (tokens)": self.pool.capacity_tokens,
            "cache bytes": self.view.num_bytes,
            "kernels launched": LAUNCHES.total(),
        }

"""The loop for many requests, with one forward a step, which verifies guesses and makes the next ones."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from shared.cache.contiguous_memory import contiguous_memory
from shared.cache.paged_memory import PagedMemory
from shared.cache.pool.prefix import prefix_sharing
from shared.cache.view.interface import MakeMemory
from shared.cache.view.storages import STORAGES
from shared.engine import supported
from shared.engine.config import EngineConfig
from shared.engine.executor.captured import Captured
from shared.engine.executor.eager import Eager
from shared.engine.output import StepOutput
from shared.engine.runner import Runner
from shared.engine.sampling.redirects import redirects
from shared.engine.sampling.rejection import acceptance
from shared.engine.sampling.sampler import Sampler, SamplerOutput
from shared.engine.serving import ServingEngine
from shared.kernels.launch import LAUNCHES
from shared.loading.loader import load_model
from shared.loading.quantized import quantizer
from shared.loading.resolve import resolve_model
from shared.models.causal_lm import CausalLM
from shared.models.compiled import compile_model
from shared.models.fused import fuse
from shared.models.packed import pack
from shared.sampling.params import SamplingParams
from shared.sampling.thinking import ThinkingLimits
from shared.scheduling.schedule import Schedule
from shared.scheduling.scheduler import Scheduler
from shared.scheduling.static import StaticScheduler
from shared.speculation.draft_costs import set_draft_costs
from shared.speculation.draft_model import DraftModel
from shared.speculation.drafter import Drafter, NoDrafter, PendingDrafts
from shared.speculation.ngram import NGramDrafter
from shared.text.thoughts import thinks
from shared.text.tokenizer import Tokenizer
from shared.tracks.multi_token.adapter import with_adapter
from shared.tracks.multi_token.attention import mask_token_attention
from shared.tracks.multi_token.batch import MultiTokenBatch as Batch
from shared.tracks.multi_token.drafter import MultiTokenDrafter, ids_of_guesses, observers_of
from shared.tracks.multi_token.scheduler import MultiTokenScheduler, settle

SUPPORTED = supported.MULTI_TOKEN
PAGED = PagedMemory(mask_token_attention, prefix_sharing, STORAGES)
MEMORY: dict[str, MakeMemory] = {"contiguous": contiguous_memory, "paged": PAGED}
SCHEDULERS: dict[str, type[Scheduler]] = {"static": StaticScheduler, "continuous": MultiTokenScheduler}


class Engine(ServingEngine):
    """Serves many requests at a time; a step verifies guesses, and with an adapter it makes the next ones."""

    in_flight: tuple[Schedule, SamplerOutput] | None = None  # launched, but not committed yet

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """One iteration: schedule and launch a step, then finish the step before it, while this one runs.

        Without ``overlap_scheduling``, or with drafts, the launched step itself is finished.
        """
        try:
            schedule = self.propose(self.scheduler.schedule())
            launched = self.runner.forward(Batch.of(schedule, self.pool)) if schedule else None
            self.finish()
            if launched is not None:
                self.drafter.collect()
                self.in_flight = schedule, self.runner.sample(launched, schedule.sampling_rows())
            if not self.overlaps or schedule.has_drafts:
                self.finish()
        except BaseException:
            self.in_flight = None
            self.recover()
            raise
        return self.report(schedule)

    def propose(self, schedule: Schedule) -> Schedule:
        """Let the drafter propose as many drafts as were granted; it first waits for the tokens that they follow."""
        if schedule.has_drafts:
            self.finish()
        self.drafter.propose(schedule)
        return settle(schedule, self.pool)

    def finish(self) -> None:
        """Wait for the tokens of the step in flight, commit them, and make their outputs."""
        if self.in_flight is not None:
            schedule, sampled = self.in_flight
            self.scheduler.commit(schedule, sampled.wait())
            self.scheduler.finish(self.output_processor.process(schedule))
            self.drafter.observe(schedule)
            self.in_flight = None

    def __init__(self, config: EngineConfig) -> None:
        config.check(SUPPORTED)
        config = with_adapter(config)
        super().__init__(config)
        folder = resolve_model(config.model)
        quantize = quantizer(config.quantization, config.quantize_head)
        self.model = load_model(folder, dtype=config.torch_dtype, device=config.device, quantize=quantize)
        (pack if config.pack_weights else fuse)(self.model)
        self.tokenizer = Tokenizer.load(folder)
        config = self.fitted(config)
        self.drafter = make_drafter(config, self.model, self.tokenizer)
        is_capturing = config.is_on("use_cuda_graphs") and self.model.device.type == "cuda"
        make_runner = partial(Runner, executor=Captured if is_capturing else Eager, last_ids=ids_of_guesses)
        make_memory = MEMORY[config.kv_cache_backend or "paged"]
        model_pool, self.view = make_memory(config, self.model, self.max_seq_len)
        self.compile_seconds = compile_model(self.model) if config.execution == "compile" else 0.0
        self.pool = self.drafter.make_pool(model_pool, make_memory, make_runner, self.max_seq_len)
        self.scheduler = SCHEDULERS[config.batching_mode or "continuous"](config, self.pool, self.max_seq_len)
        draw = acceptance(config.acceptance_method, self.drafter.distributions)
        sizes = self.pool.max_sequences, config.most_logit_rows
        sampler = Sampler(self.model.device, math.prod(sizes), [redirects], draw)
        self.runner = make_runner(self.model, self.view, *sizes, sampler=sampler, observers=observers_of(self.drafter))
        set_draft_costs(self.scheduler, self.model, self.drafter)
        self.drafter.leave_drafts_in(PendingDrafts(self.runner.last_ids.tensor, self.pool.max_sequences))
        self.overlaps = is_capturing if config.overlap_scheduling is None else config.overlap_scheduling
        self.limits_thinking = thinks(self.tokenizer)

    def add_request(self, prompt: str | Sequence[int], params: SamplingParams, request_id: str | None = None) -> str:
        """Queue a request and return its id; raises RequestError or QueueFullError, and queues nothing."""
        arrival = self.check_request(prompt, params, request_id, "thinking_budget", "min_thinking_tokens")
        seed = self.seed_of(params)
        limits = ThinkingLimits.of(params, arrival.prompt_ids, seed, arrival.end_ids, self.tokenizer)
        return self.queue_request(arrival, seed, limit_row=limits).request_id

    def stats(self) -> dict[str, Any]:
        """Counters for ``infer generate --stats``."""
        return {
            **self.runner.stats(),
            "CUDA graph replays": self.runner.num_replays,
            "cache capacity (tokens)": self.pool.capacity_tokens,
            "cache bytes": self.view.num_bytes,
            **self.scheduler.stats(),
            "kernels launched": LAUNCHES.total(),
        }


def make_drafter(config: EngineConfig, model: CausalLM, tokenizer: Tokenizer) -> Drafter:
    """The drafter that the settings select."""
    if not config.use_speculative_decoding:
        return NoDrafter()
    if config.adapter:
        return MultiTokenDrafter(config, model, tokenizer)
    return NGramDrafter() if config.drafter == "ngram" else DraftModel(config, model, tokenizer)

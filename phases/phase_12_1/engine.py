"""The loop for many requests, on a model that several processes share: the other ranks follow what this one plans."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from shared.cache.contiguous_memory import contiguous_memory
from shared.cache.paged_memory import PagedMemory
from shared.cache.pool.prefix import prefix_sharing
from shared.cache.view.bucket_padding import bucket_attention
from shared.cache.view.interface import MakeMemory
from shared.cache.view.storages import STORAGES
from shared.engine import supported
from shared.engine.config import EngineConfig
from shared.engine.executor.captured import Captured
from shared.engine.executor.eager import Eager
from shared.engine.executor.last_ids import LastIds
from shared.engine.output import StepOutput
from shared.engine.runner import Runner
from shared.engine.sampling.grammar_masks import grammar_masks
from shared.engine.sampling.rejection import acceptance
from shared.engine.sampling.sampler import Sampler, SamplerOutput
from shared.engine.serving import ServingEngine
from shared.grammar.constraint import Constraints
from shared.grammar.tokens.pool import GrammarPool
from shared.kernels.launch import LAUNCHES
from shared.loading.placement import check_device
from shared.loading.resolve import resolve_model
from shared.models.causal_lm import CausalLM
from shared.models.fused import fuse
from shared.models.packed import pack
from shared.sampling.params import SamplingParams
from shared.scheduling.drafts import settle
from shared.scheduling.schedule import Schedule
from shared.scheduling.scheduler import Scheduler
from shared.scheduling.speculative import SpeculativeScheduler
from shared.scheduling.static import StaticScheduler
from shared.speculation.draft_costs import set_draft_costs
from shared.speculation.draft_masks import masked_draft_model
from shared.speculation.drafter import Drafter, NoDrafter
from shared.speculation.forced import ForcedTextDrafter
from shared.speculation.ngram import NGramDrafter
from shared.text.tokenizer import Tokenizer
from shared.tracks.ranks.batch import RankBatch
from shared.tracks.ranks.group import Group

SUPPORTED = supported.RANKS
PAGED = PagedMemory(bucket_attention, prefix_sharing, STORAGES)
MEMORY: dict[str, MakeMemory] = {"contiguous": contiguous_memory, "paged": PAGED}
SCHEDULERS: dict[str, type[Scheduler]] = {"static": StaticScheduler, "continuous": SpeculativeScheduler}


class Engine(ServingEngine):
    """Serves many requests at a time with a model sharded over the ranks of a group."""

    in_flight: tuple[Schedule, SamplerOutput] | None = None  # launched, but not committed yet

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """One iteration: schedule and launch a step, then finish the step before it, while this one runs.

        Without ``overlap_scheduling``, or with drafts, the launched step itself is finished.
        """
        try:
            schedule = self.propose(self.scheduler.schedule())
            launched = self.runner.forward(RankBatch.of(schedule, self.pool)) if schedule else None
            self.finish()
            if launched is not None:
                rows = self.constraints.masked(schedule, schedule.sampling_rows())
                self.in_flight = schedule, self.runner.sample(launched, rows)
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
            self.scheduler.commit(schedule, self.group.wait(sampled))
            self.scheduler.finish(self.output_processor.process(schedule))
            self.drafter.observe(schedule)
            self.in_flight = None

    def __init__(self, config: EngineConfig) -> None:
        config.check(SUPPORTED)
        super().__init__(config)
        folder = resolve_model(config.model)
        is_capturing = config.is_on("use_cuda_graphs") and check_device(config.device).type == "cuda"
        make_memory = MEMORY[config.kv_cache_backend or "paged"]
        make_runner = partial(Runner, executor=Captured if is_capturing else Eager, last_ids=LastIds)
        self.group = Group(config, folder, make_memory, make_runner)
        self.model = self.group.load()
        (pack if config.pack_weights else fuse)(self.model)
        self.tokenizer = Tokenizer.load(folder)
        config = self.group.config = self.fitted(config)
        grammar_pool = GrammarPool.on(self.model.device, config.grammar_pool_bytes)
        self.drafter = make_drafter(self.group, self.model, self.tokenizer, grammar_pool)
        model_pool, self.view = self.group.memory(self.model, self.max_seq_len)
        self.pool = self.drafter.make_pool(model_pool, make_memory, self.group.draft_runner, self.max_seq_len)
        self.scheduler = SCHEDULERS[config.batching_mode or "continuous"](config, self.pool, self.max_seq_len)
        draw = acceptance(config.acceptance_method, self.drafter.distributions)
        sizes = self.pool.max_sequences, config.most_logit_rows
        num_rows = math.prod(sizes)
        sampler = Sampler(self.model.device, num_rows, grammar_masks(num_rows, grammar_pool), draw)
        self.runner = self.group.runner(self.model, self.view, *sizes, sampler=sampler)
        set_draft_costs(self.scheduler, self.model, self.drafter)
        self.constraints = Constraints.with_tokenizer(self.tokenizer, self.model.config.vocab_size, grammar_pool)
        self.overlaps = is_capturing if config.overlap_scheduling is None else config.overlap_scheduling

    def add_request(self, prompt: str | Sequence[int], params: SamplingParams, request_id: str | None = None) -> str:
        """Queue a request and return its id; raises RequestError or QueueFullError, and queues nothing."""
        arrival = self.check_request(prompt, params, request_id, "structured_output")
        return self.queue_request(arrival, constraint=self.constraints.of(params)).request_id

    def stats(self) -> dict[str, Any]:
        """Counters for ``infer generate --stats``."""
        return {
            **self.runner.stats(),
            "CUDA graph replays": self.runner.num_replays,
            "cache capacity (tokens)": self.pool.capacity_tokens,
            "cache bytes": self.view.num_bytes,
            **self.scheduler.stats(),
            "forced drafts accepted (tokens)": self.scheduler.num_accepted_forced_drafts,
            **self.constraints.stats(),
            "kernels launched": LAUNCHES.total(),
        }


def make_drafter(group: Group, model: CausalLM, tokenizer: Tokenizer, pool: GrammarPool | None) -> Drafter:
    """The drafter that the settings select, followed by forced text."""
    config = group.config
    if not config.use_speculative_decoding:
        return NoDrafter()
    if config.drafter == "ngram":
        return ForcedTextDrafter(NGramDrafter(), tokenizer)
    return ForcedTextDrafter(masked_draft_model(config, model, tokenizer, pool, group.load_draft), tokenizer)

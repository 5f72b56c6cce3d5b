"""The loop for many requests, with one forward a step, which verifies guesses and makes the next ones."""

import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from shared.cache.contiguous_memory import contiguous_memory
from shared.cache.multi_token_memory import multi_token_memory
from shared.cache.view import MakeMemory
from shared.engine.captured import Captured
from shared.engine.config import EngineConfig
from shared.engine.executor import Eager
from shared.engine.multi_token_batch import MultiTokenBatch as Batch
from shared.engine.output import StepOutput
from shared.engine.output_processor import OutputProcessor
from shared.engine.prompt import check_prompt
from shared.engine.record import EngineLoad, StepRecord
from shared.engine.redirects import redirects
from shared.engine.rejection import acceptance
from shared.engine.request import Request
from shared.engine.runner import Runner
from shared.engine.sampler import Sampler, SamplerOutput
from shared.kernels.launch import LAUNCHES
from shared.loading.loader import load_model
from shared.loading.quantized import quantizer
from shared.loading.resolve import resolve_model
from shared.models.causal_lm import CausalLM
from shared.models.compiled import compile_model
from shared.models.fused import fuse
from shared.models.packed import pack
from shared.sampling.params import SamplingParams
from shared.sampling.thinking import ThinkingLimits, thinks
from shared.scheduling.multi_token import MultiTokenScheduler, settle
from shared.scheduling.schedule import Schedule
from shared.scheduling.scheduler import Scheduler
from shared.scheduling.static import StaticScheduler
from shared.speculation.adapter import with_adapter
from shared.speculation.draft_costs import weigh
from shared.speculation.draft_model import DraftModel
from shared.speculation.drafter import Drafter, PendingDrafts
from shared.speculation.multi_token import MultiTokenDrafter, ids_of_guesses, observers_of
from shared.speculation.ngram import NGramDrafter
from shared.text.tokenizer import Tokenizer

SUPPORTED = {
    "model",
    "dtype",
    "device",
    "max_seq_len",
    "seed",
    "attention_backend",
    "attention_backend=flash",
    "attention_backend=planned",
    "pack_weights",
    "max_batch_size",
    "max_num_batched_tokens",
    "max_waiting_requests",
    "kv_cache_backend",
    "kv_cache_backend=paged",
    "batching_mode",
    "batching_mode=continuous",
    "scheduler_policy",
    "max_decode_interval",
    "block_size",
    "num_gpu_blocks",
    "use_chunked_prefill",
    "prefill_chunk_size",
    "max_prefill_chunks_per_step",
    "use_prefix_caching",
    "use_cuda_graphs",
    "overlap_scheduling",
    "kv_cache_dtype",
    "quantization",
    "quantize_head",
    "use_speculative_decoding",
    "drafter",
    "draft_model",
    "spec_length",
    "acceptance_method",
    "adapt_spec_length",
    "adapter",
    "execution",
}
MEMORY: dict[str, MakeMemory] = {"contiguous": contiguous_memory, "paged": multi_token_memory}
SCHEDULERS: dict[str, type[Scheduler]] = {"static": StaticScheduler, "continuous": MultiTokenScheduler}
DRAFTERS: dict[str, Callable[[EngineConfig, CausalLM, Tokenizer], Drafter]] = {
    "ngram": lambda *_: NGramDrafter(),
    "model": DraftModel,
    "adapter": MultiTokenDrafter,
}


class Engine:
    """Serves many requests at a time; a step verifies guesses, and with an adapter it makes the next ones."""

    def __init__(self, config: EngineConfig) -> None:
        config.check(SUPPORTED)
        self.config = config = with_adapter(config)
        folder = resolve_model(config.model)
        quantize = quantizer(config.quantization, config.quantize_head)
        self.model = load_model(folder, dtype=config.torch_dtype, device=config.device, quantize=quantize)
        (pack if config.pack_weights else fuse)(self.model)
        self.tokenizer = Tokenizer.load(folder)
        self.max_seq_len = config.sequence_limit(self.model.max_positions)
        self.drafter: Drafter | None = None
        if config.use_speculative_decoding:
            name = "adapter" if config.adapter else config.drafter or "model"
            self.drafter = DRAFTERS[name](config, self.model, self.tokenizer)
        is_capturing = config.is_on("use_cuda_graphs") and self.model.device.type == "cuda"
        make_runner = partial(Runner, executor=Captured if is_capturing else Eager, last_ids=ids_of_guesses)
        make_memory = MEMORY[config.kv_cache_backend or "paged"]
        self.pool, self.view = make_memory(config, self.model, self.max_seq_len)
        self.compile_seconds = compile_model(self.model) if config.execution == "compile" else 0.0
        if self.drafter is not None:
            self.pool = self.drafter.join(self.pool, make_memory, make_runner, self.max_seq_len)
        self.scheduler = SCHEDULERS[config.batching_mode or "continuous"](config, self.pool, self.max_seq_len)
        draw = acceptance(config.acceptance_method, None if self.drafter is None else self.drafter.distributions)
        sizes = self.pool.max_sequences, config.most_logit_rows
        sampler = Sampler(self.model.device, math.prod(sizes), [redirects], draw)
        observers = observers_of(self.drafter)
        self.runner = make_runner(self.model, self.view, *sizes, sampler=sampler, observers=observers)
        if self.drafter is not None:
            weigh(self.scheduler, self.model, self.drafter)
            self.drafter.leave_drafts_in(PendingDrafts(self.runner.last_ids.tensor, self.pool.max_sequences))
        self.overlaps = is_capturing if config.overlap_scheduling is None else config.overlap_scheduling
        self.in_flight: tuple[Schedule, SamplerOutput] | None = None
        self.limits_thinking = thinks(self.tokenizer)
        self.output_processor = OutputProcessor(self.tokenizer, self.max_seq_len)
        self.seeds = random.Random(config.seed)
        self.request_ids = itertools.count()
        self.answers: dict[str, deque[StepOutput]] = {}  # outputs that `generate` has not yielded yet
        self.last_step: StepRecord | None = None

    def add_request(self, prompt: str | Sequence[int], params: SamplingParams, request_id: str | None = None) -> str:
        """Queue a request and return its id; raises RequestError or QueueFullError, and queues nothing."""
        prompt_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        prompt_ids = check_prompt(prompt_ids, self.model.config.vocab_size, self.max_seq_len)
        end_ids = params.end_ids(self.tokenizer.eos_ids, self.model.config.vocab_size)
        if request_id is None:
            request_id = next(name for name in map(str, self.request_ids) if name not in self.scheduler)
        params.refuse("structured_output", "12")
        self.scheduler.check(request_id, len(prompt_ids), params)
        seed = self.seeds.getrandbits(64) if params.seed is None else params.seed
        limits = ThinkingLimits.of(params, prompt_ids, seed, end_ids, self.tokenizer)
        request = Request(request_id, prompt_ids, params, seed, end_ids, steer=limits)
        self.scheduler.add(request)
        self.output_processor.add(request)
        return request_id

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """One iteration: schedule and launch a step, then finish the step before it, while this one runs.

        Without ``overlap_scheduling``, or with drafts, the launched step itself is finished. A step that is interrupted
        can be repeated: what was launched is dropped, and the next step also returns the outputs that were committed.
        """
        try:
            schedule = self.propose(self.scheduler.schedule())
            launched = self.runner.forward(Batch.of(schedule, self.pool)) if schedule else None
            self.finish()
            if launched is not None:
                if self.drafter is not None:
                    self.drafter.collect()
                self.in_flight = schedule, self.runner.sample(launched, schedule.sampling_rows())
            if not self.overlaps or schedule.has_drafts:
                self.finish()
        except BaseException:
            self.in_flight = None
            self.scheduler.drop_in_flight()
            self.scheduler.finish(self.output_processor.catch_up())
            raise
        outputs = self.output_processor.take()
        self.last_step = StepRecord.of(self.scheduler, schedule, outputs)
        return outputs

    def abort(self, request_id: str) -> bool:
        """Abort a request, which gives no further output; False if it is neither waiting nor running."""
        request = self.scheduler.abort(request_id)
        if request is not None:
            self.output_processor.drop(request)
        return request is not None

    def has_work(self) -> bool:
        """Whether a step has outputs to return or requests to run."""
        return self.in_flight is not None or bool(self.output_processor.ready) or self.scheduler.has_work()

    def generate(self, prompt: str | Sequence[int], params: SamplingParams) -> Iterator[StepOutput]:
        """Yield one output per token until the request finishes; raises RequestError before anything is computed.

        Each iterator steps the engine, so several may be used alternately, but no other caller may step meanwhile.
        """
        request_id = self.add_request(prompt, params)
        mine = self.answers[request_id] = deque()
        try:
            while mine or request_id in self.scheduler:
                if not mine:
                    for output in self.step():
                        self.answers.get(output.request_id, deque()).append(output)
                    continue
                output = mine.popleft()
                if output.error is not None:
                    raise RuntimeError(output.error)
                yield output
        finally:
            del self.answers[request_id]
            self.abort(request_id)

    def propose(self, schedule: Schedule) -> Schedule:
        """Let the drafter propose what the schedule has room for; first the tokens that drafts follow are awaited."""
        if self.drafter is None:
            return schedule
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
            self.in_flight = None

    def stats(self) -> dict[str, Any]:
        """Counters for ``infer generate --stats``."""
        return {
            "tokens computed": self.runner.num_tokens_computed,
            "forward passes": self.runner.num_forwards,
            "CUDA graph replays": self.runner.num_replays,
            "cache capacity (tokens)": self.pool.capacity_tokens,
            "cache bytes": self.view.num_bytes,
            "prefix cache queries (tokens)": self.scheduler.num_prefix_queries,
            "prefix cache hits (tokens)": self.scheduler.num_prefix_hits,
            "step costs": self.scheduler.step_costs or "none",
            "drafts accepted (tokens)": self.scheduler.num_accepted_drafts,
            "drafts rejected (tokens)": self.scheduler.num_rejected_drafts,
            **{f"accepted at position {n}": count for n, count in enumerate(self.scheduler.num_accepted_by_position)},
            "kernels launched": LAUNCHES.total(),
        }

    def load(self) -> EngineLoad:
        """Running and waiting requests, and KV cache usage."""
        return EngineLoad.of(self.scheduler)

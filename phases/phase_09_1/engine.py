"""The loop for many requests, which may be made of segments: context computed earlier, in any order."""

from collections.abc import Sequence
from functools import partial

import torch

from shared.engine import supported
from shared.engine.batch import Batch
from shared.engine.config import EngineConfig
from shared.engine.executor.captured import Captured
from shared.engine.executor.eager import Eager
from shared.engine.executor.last_ids import LastIds
from shared.engine.output import StepOutput
from shared.engine.prompt import check_prompt
from shared.engine.runner import Runner
from shared.engine.sampling.sampler import SamplerOutput
from shared.engine.serving import ServingEngine
from shared.errors import RequestError
from shared.kernels.launch import LAUNCHES
from shared.loading.loader import load_model
from shared.loading.resolve import resolve_model
from shared.models.fused import fuse
from shared.models.packed import pack
from shared.sampling.params import SamplingParams
from shared.scheduling.schedule import Schedule
from shared.scheduling.scheduler import Scheduler
from shared.scheduling.static import StaticScheduler
from shared.text.tokenizer import Tokenizer
from shared.tracks.segments.blend import blend_segments
from shared.tracks.segments.memory import segment_memory
from shared.tracks.segments.registry import SegmentRegistry
from shared.tracks.segments.scheduler import SegmentScheduler

SUPPORTED = supported.OVERLAPPED_STEPS


class Engine(ServingEngine):
    """Serves many requests at a time; each may begin with segments, which are computed once and cached by content."""

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
            # Also outputs beyond the schedule: requests that waited for a segment that could not be computed.
            self.scheduler.finish(self.output_processor.catch_up())
            self.in_flight = None

    def __init__(self, config: EngineConfig) -> None:
        config.check(SUPPORTED)
        super().__init__(config)
        folder = resolve_model(config.model)
        self.model = load_model(folder, dtype=config.torch_dtype, device=config.device)
        (pack if config.pack_weights else fuse)(self.model)
        self.tokenizer = Tokenizer.load(folder)
        config = self.fitted(config)
        self.segments = SegmentRegistry()
        self.pool, self.view = segment_memory(config, self.model, self.max_seq_len, self.segments)
        self.scheduler: Scheduler = StaticScheduler(config, self.pool, self.max_seq_len)
        if config.batching_mode != "static":
            self.scheduler = SegmentScheduler(config, self.pool, self.max_seq_len, self.segments)
        is_capturing = config.is_on("use_cuda_graphs") and self.model.device.type == "cuda"
        make_runner = partial(Runner, executor=Captured if is_capturing else Eager, last_ids=LastIds)
        self.runner = make_runner(self.model, self.view, self.pool.max_sequences)
        self.overlaps = is_capturing if config.overlap_scheduling is None else config.overlap_scheduling

    def add_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        segment_ids: Sequence[str] = (),
    ) -> str:
        """Queue a request and return its id; raises RequestError or QueueFullError, and queues nothing.

        Args:
            segment_ids: of registered segments, which precede the prompt in this order.
        """
        segments = tuple(self.segments.find(segment_id) for segment_id in segment_ids)
        prompt_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        limits = self.model.config.vocab_size, self.max_seq_len
        num_own = len(check_prompt(prompt_ids, *limits))
        prompt_ids = [*(token_id for segment in segments for token_id in segment.token_ids), *prompt_ids]
        if segments:
            check_prompt(prompt_ids, *limits)
            if params.prompt_logprobs is not None:
                raise RequestError("prompt_logprobs is set, and segments were computed without logits; leave it out.")
            self.segments.check(segments, min(num_own + params.max_new_tokens, self.max_seq_len))
        request = self.queue_request(self.check_request(prompt_ids, params, request_id))
        if segments:
            self.segments.contexts[request] = segments
        return request.request_id

    def stats(self) -> dict[str, int]:
        """Counters for ``infer generate --stats``."""
        return {
            **self.runner.stats(),
            "CUDA graph replays": self.runner.num_replays,
            "cache capacity (tokens)": self.pool.capacity_tokens,
            "cache bytes": self.view.num_bytes,
            **self.scheduler.stats(),
            "kernels launched": LAUNCHES.total(),
            "segments in the cache": len(self.segments.resident),
        }

    def register(self, content: str | Sequence[int], role: str = "user") -> str:
        """Register a segment, to be computed in the next steps, and return its id; the same content has the same id.

        Raises RequestError if it is empty, too long for the model or the KV cache, or if segments are refused.
        """
        token_ids = self.tokenizer.encode(content) if isinstance(content, str) else content
        token_ids = check_prompt(token_ids, self.model.config.vocab_size, self.max_seq_len)
        return self.segments.register(role, token_ids)

    def blend(self, segment_ids: Sequence[str], fraction: float) -> str:
        """Join segments, recompute a fraction of their tokens with the whole context, and return the new id.

        Raises RequestError if a segment is unknown or not computed yet, or the whole is too long. Call this between
        steps.
        """
        segments = [self.segments.find(segment_id) for segment_id in segment_ids]
        return blend_segments(self.model, self.view, self.pool, self.segments, segments, fraction).segment_id

"""What every batching engine does besides its step: queue requests, return outputs, abort requests. Introduced in phase
4.

A phase's engine has one ancestor, this one. Its own file shows what is new: what a step does, and the parts it uses.
"""

import itertools
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from shared.engine.config import EngineConfig
from shared.engine.output import StepOutput
from shared.engine.output_processor import OutputProcessor
from shared.engine.prompt import check_prompt
from shared.engine.record import EngineLoad, StepRecord
from shared.engine.request import Request
from shared.models.causal_lm import CausalLM
from shared.sampling.params import SamplingParams
from shared.scheduling.schedule import Schedule
from shared.scheduling.scheduler import Scheduler
from shared.text.tokenizer import Tokenizer


class Arrival(NamedTuple):
    """A request that has been checked but not queued."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    end_ids: tuple[int, ...]


class ServingEngine(ABC):
    """Serves many requests at a time; one thread calls it. A phase's engine creates the parts declared here."""

    model: CausalLM
    tokenizer: Tokenizer
    max_seq_len: int
    scheduler: Scheduler

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.seeds = random.Random(config.seed)
        self.request_ids = itertools.count()
        self.answers: dict[str, deque[StepOutput]] = {}  # outputs that `generate` has not yielded yet
        self.last_step: StepRecord | None = None

    def fitted(self, config: EngineConfig) -> EngineConfig:
        """Find ``max_seq_len``, and return the settings resolved for the loaded model."""
        self.max_seq_len = config.sequence_limit(self.model.max_positions)
        if config.prefill_wait_ms is not None:
            from shared.scheduling.chunk_wait import within_wait  # phase 7 introduces it

            self.config = config = within_wait(config, self.model)
        return config

    @cached_property
    def output_processor(self) -> OutputProcessor:
        """Produces the outputs of committed tokens."""
        return OutputProcessor(self.tokenizer, self.max_seq_len)

    @abstractmethod
    def step(self) -> list[StepOutput]:
        """One iteration; returns the outputs of all requests that got any.

        A step that is interrupted, or raises, can be repeated: launched work is dropped, and the next step also returns
        the outputs that were committed.
        """

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Counters for ``infer generate --stats``."""

    def add_request(self, prompt: str | Sequence[int], params: SamplingParams, request_id: str | None = None) -> str:
        """Queue a request and return its id; raises RequestError or QueueFullError, and queues nothing."""
        return self.queue_request(self.check_request(prompt, params, request_id)).request_id

    def check_request(
        self, prompt: str | Sequence[int], params: SamplingParams, request_id: str | None, *supported: str
    ) -> Arrival:
        """The checked request, ready to be queued; raises RequestError or QueueFullError, and changes no state.

        Args:
            supported: the parameters that the engine supports of those that not every batching engine does.
        """
        params.check({"prompt_logprobs", *supported})
        prompt_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        vocab_size = self.model.config.vocab_size
        prompt_ids = check_prompt(prompt_ids, vocab_size, self.max_seq_len)
        end_ids = params.end_ids(self.tokenizer.eos_ids, vocab_size)
        if request_id is None:
            request_id = next(name for name in map(str, self.request_ids) if name not in self.scheduler)
        self.scheduler.check(request_id, len(prompt_ids), params)
        return Arrival(request_id, prompt_ids, params, end_ids)

    def queue_request(self, arrival: Arrival, seed: int | None = None, **parts: Any) -> Request:
        """Queue a checked request, with further fields of :class:`Request` in ``parts``; with ``seed`` None, it uses
        the seed of its parameters or a new one.
        """
        request_id, prompt_ids, params, end_ids = arrival
        seed = self.seed_of(params) if seed is None else seed
        request = Request(request_id, prompt_ids, params, seed, end_ids, **parts)
        self.scheduler.add(request)
        self.output_processor.add(request)
        return request

    def seed_of(self, params: SamplingParams) -> int:
        """The seed for these parameters: their own, or the engine's next."""
        return self.seeds.getrandbits(64) if params.seed is None else params.seed

    def abort(self, request_id: str) -> bool:
        """Abort a request; it produces no further output. False if it is neither waiting nor running."""
        request = self.scheduler.abort(request_id)
        if request is not None:
            self.output_processor.drop(request)
        return request is not None

    def has_work(self) -> bool:
        """Whether a step has outputs to return or requests to run."""
        return bool(self.output_processor.ready) or self.scheduler.has_work()

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

    def load(self) -> EngineLoad:
        """Running and waiting requests, and KV cache usage."""
        return EngineLoad.of(self.scheduler)

    def report(self, schedule: Schedule) -> list[StepOutput]:
        """The outputs made since the last call; records what the step of ``schedule`` did in ``last_step``."""
        outputs = self.output_processor.take()
        self.last_step = StepRecord.of(self.scheduler, schedule, outputs)
        return outputs

    def recover(self) -> None:
        """Drop what was launched and not committed, after a step that was interrupted."""
        self.scheduler.drop_in_flight()
        self.scheduler.finish(self.output_processor.catch_up())

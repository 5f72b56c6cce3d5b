"""An engine's loop without a model: tokens by hand, committed in their own step or one step late."""

from collections import deque
from collections.abc import Callable, Collection

from shared.cache.pool.paged import PagedKVCachePool
from shared.engine.output import StepOutput
from shared.engine.output_processor import OutputProcessor
from shared.engine.request import Request, TokenLogprobs
from shared.engine.sampling.sampler import SampledTokens
from shared.sampling.params import SamplingParams
from shared.scheduling.chunks import Chunks
from shared.scheduling.schedule import Schedule, Scheduled
from shared.scheduling.scheduler import Scheduler
from shared.text.tokenizer import Tokenizer
from tests.comparison import assert_equal

LETTER = 70  # a token of text
NO_TOKEN = 999_999  # of no output
TokenAt = Callable[[Request, int], int]
"""The token of a request's answer at an index: what a model would say, whatever it was scheduled beside."""


def index_of(entry: Scheduled) -> int:
    """The index, in the request's output, of the last token that an entry samples: the entry alone says so, while
    earlier tokens are in flight."""
    return entry.start + entry.num_tokens - len(entry.request.prompt_ids)


def names(schedule: Schedule) -> str:
    return "".join(entry.request.request_id for entry in schedule)


def shown(schedule: Schedule) -> str:
    """What a step preempts, prefills and decodes, as "preempted|prompts|decoding"."""
    return f"{''.join(schedule.preempted)}|{names(schedule.prompts)}|{names(schedule.decoding)}"


class TokenPool(PagedKVCachePool):
    """Memory for so many tokens, any of which serves any request: blocks of one token."""

    def __init__(self, capacity: int, watermark: int = 0) -> None:
        super().__init__(capacity, 1, max_sequences=16)
        self.watermark_tokens = watermark

    def grants(self) -> dict[str, int]:
        """Tokens reserved for each request, by its id, in the order of admission."""
        return {request.request_id: self.granted[row] for request, row in self.rows.items()}


class Loop:
    """``num_in_flight`` steps are scheduled before the one before them is committed."""

    def __init__(self, scheduler: Scheduler, tokenizer: Tokenizer, token_at: TokenAt, num_in_flight: int = 0) -> None:
        self.scheduler = scheduler
        self.processor = OutputProcessor(tokenizer, scheduler.max_seq_len)
        self.token_at = token_at
        self.num_in_flight = num_in_flight
        self.in_flight: deque[Schedule] = deque()

    def add(self, request: Request) -> Request:
        self.scheduler.add(request)
        self.processor.add(request)
        return request

    def add_new(self, name: str, num_prompt_tokens: int = 3, max_new_tokens: int = 4, **params: object) -> Request:
        """Check and add a request of so many equal tokens."""
        made = SamplingParams(max_new_tokens=max_new_tokens, **params)  # type: ignore[arg-type]
        self.scheduler.check(name, num_prompt_tokens, made)
        return self.add(Request(name, [5] * num_prompt_tokens, made, 0))

    def abort(self, request_id: str) -> bool:
        request = self.scheduler.abort(request_id)
        if request is not None:
            self.processor.drop(request)
        return request is not None

    def step(self) -> tuple[Schedule, list[StepOutput]]:
        """What it schedules, and the outputs of the step that it commits."""
        schedule = self.scheduler.schedule()
        self.in_flight.append(schedule)
        while len(self.in_flight) > self.num_in_flight:
            self.finish(self.in_flight.popleft())
        return schedule, self.processor.take()

    def steps(self, count: int) -> list[str]:
        """What each of so many steps preempts, prefills and decodes."""
        return [shown(self.step()[0]) for _ in range(count)]

    def check_steps(self, expected: list[str]) -> None:
        """The next steps preempt, prefill and decode these requests."""
        assert_equal(self.steps(len(expected)), expected, "steps: preempted|prompts|decoding", ("step",))

    def finish(self, schedule: Schedule, errors: Collection[Request] = ()) -> None:
        """As one batch where steps overlap or prompts are chunked; else prompts by themselves, then what decodes."""
        is_chunked = isinstance(self.scheduler.prefill, Chunks)  # type: ignore[attr-defined]
        is_one = self.num_in_flight or is_chunked
        for part in (schedule,) if is_one else (schedule.prompts, schedule.decoding):
            self.commit(part, errors)
            self.scheduler.finish(self.processor.process(part))

    def commit(self, part: Schedule, errors: Collection[Request] = ()) -> None:
        """Those in ``errors`` could not be computed."""
        failed = {n: RuntimeError("injected") for n, entry in enumerate(part) if entry.request in errors}
        computed = [entry for entry in part if entry.request not in errors]
        rows = [(entry.request.params.logprobs, token_id) for entry in computed for token_id in self.sampled(entry)]
        logprobs = [None if count is None else TokenLogprobs(-float(token_id), ()) for count, token_id in rows]
        sampled = SampledTokens([token_id for _, token_id in rows], logprobs if any(logprobs) else None, failed)
        self.scheduler.commit(part, sampled)

    def sampled(self, entry: Scheduled) -> list[int]:
        """The token of each logit row of an entry; after a wrong draft, one of no output."""
        request, first = entry.request, index_of(entry) - entry.num_drafts
        ids = [self.token_at(request, first + row) for row in range(entry.num_logit_rows)]
        num_right = 0
        while num_right < entry.num_drafts and request.draft_ids[num_right] == ids[num_right]:
            num_right += 1
        return ids[: num_right + 1] + [NO_TOKEN] * (len(ids) - num_right - 1)

    def break_off(self) -> list[StepOutput]:
        """What an engine does when a step is interrupted; the outputs that come with the next step."""
        self.in_flight.clear()
        self.scheduler.drop_in_flight()
        self.scheduler.finish(self.processor.catch_up())
        return self.processor.take()

    def has_work(self) -> bool:
        return bool(self.in_flight) or self.scheduler.has_work()

"""Scheduling over random arrivals: order, budgets, fairness, and that every request finishes."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.cache.contiguous_pool import ContiguousKVCachePool
from shared.engine.config import BATCHING_MODES, SCHEDULER_POLICIES, EngineConfig
from shared.engine.output import StepOutput
from shared.engine.request import Request, RequestStatus, TokenLogprobs
from shared.engine.sampler import SampledTokens
from shared.errors import RequestError
from shared.sampling.params import SamplingParams
from shared.scheduling.continuous import ContinuousScheduler
from shared.scheduling.policies import POLICIES
from shared.scheduling.schedule import Schedule
from shared.scheduling.static import StaticScheduler
from shared.text.stopping import FinishReason
from shared.text.tokenizer import Tokenizer
from tests.comparison import assert_equal
from tests.unit.scheduling_loop import Loop, names

MAX_SEQ_LEN = 48
SCHEDULERS = {"static": StaticScheduler, "continuous": ContinuousScheduler}
LETTER = 70  # a token of text


def make(
    tokenizer: Tokenizer,
    mode: str = "continuous",
    num_regions: int | None = None,
    num_in_flight: int = 0,
    **config: object,
) -> Loop:
    """Every token of every answer is the same letter."""
    settings_ = EngineConfig(batching_mode=mode, **config)
    pool = ContiguousKVCachePool(num_regions or settings_.max_batch_size, MAX_SEQ_LEN)
    scheduler = SCHEDULERS[mode](settings_, pool, MAX_SEQ_LEN)
    return Loop(scheduler, tokenizer, lambda request, index: LETTER, num_in_flight)


# What each scheduler does, step by step.


def add_abc(loop: Loop) -> None:
    """Two places; a ends after 2 tokens, b after 5, c after 2."""
    for name, tokens in (("a", 2), ("b", 5), ("c", 2)):
        loop.add(request(name, max_new_tokens=tokens))


def test_a_static_batch_runs_until_its_last_answer_ends(tokenizer: Tokenizer) -> None:
    loop = make(tokenizer, "static", max_batch_size=2)
    add_abc(loop)
    assert_equal(
        loop.steps(8), ["ab|", "|ab", "|b", "|b", "|b", "c|", "|c", "|"], "drawing: prompts|decoding", ("step",)
    )


def test_continuous_batching_fills_a_row_in_the_next_step(tokenizer: Tokenizer) -> None:
    loop = make(tokenizer, max_batch_size=2)
    add_abc(loop)
    assert_equal(loop.steps(6), ["ab|", "|ab", "c|b", "|bc", "|b", "|"], "drawing: prompts|decoding", ("step",))


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("fcfs", ["ab|", "c|ab", "d|abc", "e|abcd", "f|abcde", "|abcdef", "|abcdef"]),
        ("prefill_first", ["ab|", "c|", "d|", "e|abcd", "f|", "|abcdef", "|abcdef"]),
        ("decode_round_robin", ["a|", "b|a", "c|a", "d|b", "e|ac", "f|bd", "|abcdef"]),
    ],
)
def test_policies_differ_in_decoding_beside_prompts(tokenizer: Tokenizer, policy: str, expected: list[str]) -> None:
    """The table of shared.scheduling.policies: prompts of 6, 4, and then 10 tokens a piece, a budget of 10, N = 3."""
    loop = make(tokenizer, scheduler_policy=policy, max_decode_interval=3, max_num_batched_tokens=10, max_batch_size=8)
    for name, length in zip("abcdef", (6, 4, 10, 10, 10, 10), strict=True):
        loop.add(request(name, length, max_new_tokens=20))
    assert_equal(loop.steps(7), expected, "drawing: prompts|decoding", ("step",))


def test_the_config_knows_the_names_of_the_tables() -> None:
    assert tuple(POLICIES) == SCHEDULER_POLICIES
    assert tuple(SCHEDULERS) == BATCHING_MODES


# Every arrival, every policy.


@dataclass
class Arrival:
    before_step: int
    num_prompt_tokens: int
    max_new_tokens: int
    ends_at: int | None  # the model's own end, at this token


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        st.integers(0, 30),
        st.integers(1, MAX_SEQ_LEN - 1),
        st.integers(1, 20),
        st.one_of(st.none(), st.integers(1, 20)),
    ),
    max_size=20,
)
CONFIGS = st.fixed_dictionaries({"max_batch_size": st.integers(1, 5), "max_num_batched_tokens": st.integers(1, 80)})
SHARING = st.fixed_dictionaries(
    {"scheduler_policy": st.sampled_from(SCHEDULER_POLICIES), "max_decode_interval": st.integers(1, 5)}
)


@dataclass
class Run:
    """A run over arrivals, with what every scheduler must keep checked in each step."""

    loop: Loop
    interval: int
    arrivals: list[Arrival]
    added: list[str] = field(default_factory=list)
    admitted: list[str] = field(default_factory=list)
    finished: dict[str, int] = field(default_factory=dict)  # the step
    served: dict[str, int] = field(default_factory=dict)  # the last step
    num_entries: dict[str, int] = field(default_factory=dict)  # steps that computed the request
    answers: dict[str, list[int | None]] = field(default_factory=dict)

    def go(self) -> None:
        queue = sorted(enumerate(self.arrivals), key=lambda item: item[1].before_step)
        self.by_name = {str(n): arrival for n, arrival in queue}
        self.loop.token_at = self.token
        number = 0
        while queue or self.loop.has_work():
            while queue and queue[0][1].before_step <= number:
                n, arrival = queue.pop(0)
                self.loop.add(request(str(n), arrival.num_prompt_tokens, arrival.max_new_tokens))
                self.added.append(str(n))
            self.step(number)
            if not queue and not self.loop.scheduler.has_work():
                self.loop.in_flight.clear()
                self.loop.scheduler.drop_in_flight()
            number += 1
            assert number < 10_000, "some request is never served again"

    def step(self, number: int) -> None:
        scheduler, config = self.loop.scheduler, self.loop.scheduler.config
        had_work = scheduler.has_work()
        decoding = [r.request_id for r in scheduler._decoding()]
        schedule, outputs = self.loop.step()
        if not self.loop.num_in_flight:
            assert bool(schedule) == had_work, "no step is lost while there is work"
        planned = [entry.request.request_id for entry in schedule]
        assert len(set(planned)) == len(planned), f"a request is twice in one step: {planned}"
        assert len(planned) <= config.max_batch_size, f"{len(planned)} requests in a batch of {config.max_batch_size}"
        tokens = sum(entry.num_tokens for entry in schedule.prompts)
        assert tokens <= config.max_num_batched_tokens or len(schedule.prompts) == 1, f"{tokens} tokens in one step"
        for name, running in scheduler.running.items():
            wanted = min(self.by_name[name].num_prompt_tokens + self.by_name[name].max_new_tokens, MAX_SEQ_LEN)
            assert scheduler.pool.reserve(running, wanted), "granted at admission, so never refused"
        for name in decoding:
            assert name in planned or number - self.served[name] < self.interval, "a token every N steps"
        self.admitted += [entry.request.request_id for entry in schedule.prompts]
        self.served |= dict.fromkeys(planned, number)
        for name in planned:
            self.num_entries[name] = self.num_entries.get(name, 0) + 1
        for output in outputs:
            assert output.request_id not in self.finished, "a token of a request that has finished"
            self.answers.setdefault(output.request_id, []).append(output.token_id)
            if output.finish_reason is not None:
                self.finished[output.request_id] = number
        held = [*scheduler.running.values(), *scheduler.ending]
        assert_equal(scheduler.pool.used_tokens, sum(r.num_computed_tokens for r in held), "used tokens")

    def token(self, r: Request, index: int) -> int:
        ends = self.by_name[r.request_id].ends_at == index + 1
        return min(self.loop.processor.tokenizer.eos_ids) if ends else LETTER + index

    def check_the_end(self) -> None:
        assert_equal(self.admitted, self.added, "admitted: in the order of arrival", ("place",))
        assert_equal(set(self.finished), set(self.added), "finished requests")
        assert_equal(self.loop.scheduler.pool.audit(), [], "audit", ("line",))
        assert not self.loop.processor.streams, "a stream was not closed"
        for name, answer in self.answers.items():
            arrival = self.by_name[name]
            longest = min(arrival.max_new_tokens, MAX_SEQ_LEN - arrival.num_prompt_tokens)
            length = min(longest, arrival.ends_at or longest)
            r = request(name)
            assert_equal(answer, [self.token(r, n) for n in range(length)], f"answer of {name}", ("token",))
            # An end of sequence is seen when its token is there; until then one step more may have been scheduled.
            late = self.loop.num_in_flight if length < longest else 0
            assert length <= self.num_entries[name] <= length + late, (
                f"{self.num_entries[name]} steps for {length} tokens"
            )


IN_FLIGHT = st.integers(0, 1)


# One request.


def test_the_end_of_sequence_and_a_stop_string_end_one_and_not_its_neighbours(tokenizer: Tokenizer) -> None:
    loop = make(tokenizer)
    text = tokenizer.decode([LETTER])
    loop.add(request("a", max_new_tokens=9))
    loop.add(request("b", max_new_tokens=9, stop=text))
    loop.add(request("c", max_new_tokens=9, ignore_eos=True))
    _, outputs = loop.step()
    assert [(o.request_id, o.finish_reason, o.stop) for o in outputs] == [
        ("a", None, None),
        ("b", FinishReason.STOP, text),
        ("c", None, None),
    ]
    loop.token_at = lambda request, index: min(tokenizer.eos_ids)
    _, outputs = loop.step()
    assert [(o.request_id, o.finish_reason) for o in outputs] == [("a", FinishReason.EOS), ("c", None)]
    assert list(loop.scheduler.running) == ["c"]


def test_logprobs_go_to_those_who_asked(tokenizer: Tokenizer) -> None:
    loop = make(tokenizer)
    plain, asking = loop.add(request("a")), loop.add(request("b", logprobs=1))
    schedule = loop.scheduler.schedule()
    asked = TokenLogprobs(-0.5, ((LETTER, -0.5),))
    loop.scheduler.commit(schedule, SampledTokens([LETTER, LETTER], [None, asked]))
    assert loop.processor.process(schedule) == []
    first, second = loop.processor.take()
    assert (first.logprobs, second.logprobs) == (None, asked)
    assert (plain.output_logprobs, asking.output_logprobs) == ([], [asked])


def test_a_failed_request_says_so_once_and_its_cause_is_logged(tokenizer: Tokenizer, caplog) -> None:
    loop = make(tokenizer)
    add_abc(loop)
    loop.step()
    failed = loop.scheduler.running["a"]
    schedule = loop.scheduler.schedule()
    loop.scheduler.commit(schedule, SampledTokens([LETTER] * 2, None, {0: RuntimeError("out of luck")}))
    assert failed not in loop.scheduler.pool.regions, "what it held is free at once"
    loop.scheduler.finish(loop.processor.process(schedule))
    output = loop.processor.take()[0]
    assert (output.request_id, output.token_id, output.text) == ("a", None, "")
    assert output.finish_reason is FinishReason.ERROR
    assert output.error is not None
    assert "RuntimeError" in output.error
    assert "out of luck" not in output.error, "the cause is not the client's affair"
    assert "out of luck" in caplog.text
    assert failed.status is RequestStatus.FAILED
    assert "a" not in loop.scheduler
    schedule, outputs = loop.step()
    assert names(schedule.decoding) == "b"
    assert [o.request_id for o in outputs] == ["b"]


# One step in flight: the next is scheduled before its tokens are there.


@pytest.mark.parametrize("mode", BATCHING_MODES)
def test_tokens_come_a_step_late_and_no_step_is_too_many(tokenizer: Tokenizer, mode: str) -> None:
    loop = make(tokenizer, mode, num_in_flight=1)
    loop.add(request("a", max_new_tokens=2))
    loop.add(request("b", max_new_tokens=3))
    steps = [loop.step() for _ in range(4)]
    assert [names(schedule) for schedule, _ in steps] == ["ab", "ab", "b", ""], "ends by length are known by counts"
    outputs = [[(o.request_id, o.finish_reason) for o in outputs] for _, outputs in steps]
    over = FinishReason.LENGTH
    assert outputs == [[], [("a", None), ("b", None)], [("a", over), ("b", None)], [("b", over)]]
    assert loop.scheduler.pool.audit() == []


@pytest.mark.parametrize("mode", BATCHING_MODES)
@pytest.mark.parametrize("end", ["eos", "abort", "error"])
def test_a_request_that_ends_in_flight_keeps_its_memory_until_that_step_is_committed(
    tokenizer: Tokenizer, mode: str, end: str
) -> None:
    loop = make(tokenizer, mode, num_in_flight=1, max_batch_size=1)
    first = loop.add(request("a", max_new_tokens=9))
    loop.add(request("b", max_new_tokens=1))
    pool = loop.scheduler.pool
    loop.step()
    if end == "abort":
        loop.step()
        assert loop.abort("a")
        assert "a" not in loop.scheduler
        in_flight = loop.in_flight.popleft()
    else:
        ended, in_flight = loop.in_flight.popleft(), loop.scheduler.schedule()
        loop.token_at = lambda request, index: min(tokenizer.eos_ids)
        loop.finish(ended, errors=[first] if end == "error" else [])
        assert first.status is (RequestStatus.FAILED if end == "error" else RequestStatus.FINISHED)
    assert names(in_flight) == "a"
    assert (list(pool.regions), list(loop.scheduler.ending)) == ([first], [first])
    assert names(loop.scheduler.schedule()) == "", "the only region is not free yet"
    loop.processor.take()
    answer = list(first.output_ids)
    loop.finish(in_flight)
    assert pool.audit() == []
    assert loop.processor.take() == []
    assert first.output_ids == answer, "what the step computed for it is dropped"
    assert names(loop.scheduler.schedule()) == "b"


def test_outputs_of_a_step_that_broke_off_are_not_those_of_a_later_request_of_that_id(tokenizer: Tokenizer) -> None:
    loop = make(tokenizer)
    loop.add(request("a"))
    loop.finish(loop.scheduler.schedule())  # and no output was taken
    assert loop.abort("a")
    loop.add(request("a", max_new_tokens=1))
    assert [(o.request_id, o.finish_reason) for o in loop.step()[1]] == [("a", FinishReason.LENGTH)]

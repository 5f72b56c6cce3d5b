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


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoints: dict[str, Path]) -> Tokenizer:
    return Tokenizer.load(tiny_checkpoints["llama"])


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


def request(name: str, num_prompt_tokens: int = 3, max_new_tokens: int = 4, **params: object) -> Request:
    return Request(name, [5] * num_prompt_tokens, SamplingParams(max_new_tokens=max_new_tokens, **params), 0)


def drawing(loop: Loop, num_steps: int) -> list[str]:
    """What each step prefills and decodes, as "prompts|tokens"."""
    return [f"{names(s.prompts)}|{names(s.decoding)}" for s, _ in (loop.step() for _ in range(num_steps))]


# What each scheduler does, step by step.


def add_abc(loop: Loop) -> None:
    """Two places; a ends after 2 tokens, b after 5, c after 2."""
    for name, tokens in (("a", 2), ("b", 5), ("c", 2)):
        loop.add(request(name, max_new_tokens=tokens))


def test_a_static_batch_runs_until_its_last_answer_ends(tokenizer: Tokenizer) -> None:
    loop = make(tokenizer, "static", max_batch_size=2)
    add_abc(loop)
    assert_equal(
        drawing(loop, 8), ["ab|", "|ab", "|b", "|b", "|b", "c|", "|c", "|"], "drawing: prompts|decoding", ("step",)
    )


def test_continuous_batching_fills_a_row_in_the_next_step(tokenizer: Tokenizer) -> None:
    loop = make(tokenizer, max_batch_size=2)
    add_abc(loop)
    assert_equal(drawing(loop, 6), ["ab|", "|ab", "c|b", "|bc", "|b", "|"], "drawing: prompts|decoding", ("step",))


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
    assert_equal(drawing(loop, 7), expected, "drawing: prompts|decoding", ("step",))


def test_no_request_overtakes_one_that_does_not_fit(tokenizer: Tokenizer) -> None:
    loop = make(tokenizer, max_num_batched_tokens=10)
    for name, length in zip("abc", (8, 4, 1), strict=True):
        loop.add(request(name, length))
    assert drawing(loop, 2) == ["a|", "bc|a"]


@pytest.mark.parametrize("mode", BATCHING_MODES)
@pytest.mark.parametrize(("num_regions", "max_batch_size"), [(8, 2), (2, 8)])
def test_places_and_memory_each_limit_how_many_run(
    tokenizer: Tokenizer, mode: str, num_regions: int, max_batch_size: int
) -> None:
    loop = make(tokenizer, mode, num_regions=num_regions, max_batch_size=max_batch_size)
    for name in "abcde":
        loop.add(request(name))
    assert drawing(loop, 1) == ["ab|"]
    assert (len(loop.scheduler.running), len(loop.scheduler.waiting)) == (2, 3)


class Tokens(ContiguousKVCachePool):
    """Memory in which a request takes as many tokens as it was granted, of 20 for all."""

    def reserve(self, request: Request, num_tokens: int) -> bool:
        if request not in self.regions and num_tokens > 20 - sum(self.granted):
            return False
        return super().reserve(request, num_tokens)


def test_admission_asks_for_the_prompt_and_the_longest_answer(tokenizer: Tokenizer) -> None:
    loop = make(tokenizer)
    pool = loop.scheduler.pool = Tokens(16, MAX_SEQ_LEN)
    for name, prompt, answer in (("a", 4, 6), ("b", 2, 2), ("c", 3, 4), ("d", 1, 1)):
        loop.add(request(name, prompt, answer))
    # a has 10 of 20 and b 4; c needs 7; d would fit but does not overtake c; b finishes after two tokens.
    assert drawing(loop, 4) == ["ab|", "|ab", "cd|a", "|ac"]
    assert sum(pool.granted) == 17


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


@settings(max_examples=150, deadline=None)
@given(arrivals=ARRIVALS, config=CONFIGS, sharing=SHARING, num_in_flight=IN_FLIGHT)
def test_continuous_whatever_arrives(tokenizer: Tokenizer, arrivals, config, sharing, num_in_flight) -> None:
    loop = make(tokenizer, num_in_flight=num_in_flight, **config, **sharing)
    run = Run(loop, sharing["max_decode_interval"], arrivals)
    run.go()
    run.check_the_end()
    # The requests before mine in the queue have so many tokens, each of which comes within N steps: then it is my turn.
    spent = 0
    for name in run.added:
        arrival = run.by_name[name]
        spent += 1 + sharing["max_decode_interval"] * min(
            arrival.max_new_tokens, MAX_SEQ_LEN - arrival.num_prompt_tokens
        )
        spent += 2 * num_in_flight  # its last token comes a step late, and so does the memory that it held
        assert run.finished[name] <= 30 + spent


@settings(max_examples=100, deadline=None)
@given(arrivals=ARRIVALS, config=CONFIGS, num_in_flight=IN_FLIGHT)
def test_static_whatever_arrives(tokenizer: Tokenizer, arrivals, config, num_in_flight) -> None:
    run = Run(make(tokenizer, "static", num_in_flight=num_in_flight, **config), 1, arrivals)
    run.go()
    run.check_the_end()


@settings(max_examples=60, deadline=None)
@given(arrivals=ARRIVALS, config=CONFIGS, sharing=SHARING, num_in_flight=IN_FLIGHT)
def test_no_row_stays_empty_while_requests_wait(tokenizer: Tokenizer, arrivals, config, sharing, num_in_flight):
    loop = make(tokenizer, num_in_flight=num_in_flight, **config, **sharing)
    scheduler = loop.scheduler
    plan = scheduler.schedule

    def schedule() -> Schedule:
        num_held = len(scheduler.ending)  # by requests that ended while a step computed them
        planned = plan()
        assert not scheduler.waiting or len(scheduler.running) + num_held >= config["max_batch_size"], (
            "a request waits although a row is free"
        )
        return planned

    scheduler.schedule = schedule
    Run(loop, sharing["max_decode_interval"], arrivals).go()


@settings(max_examples=200, deadline=None)
@given(
    waits=st.lists(st.integers(1, 9), max_size=12), interval=st.integers(1, 6), name=st.sampled_from(SCHEDULER_POLICIES)
)
def test_a_policy_serves_who_is_due(waits: list[int], interval: int, name: str) -> None:
    turns = POLICIES[name].turns(waits, interval)
    assert len(turns) == len(waits)
    assert all(turn for turn, steps in zip(turns, waits, strict=True) if steps >= interval)
    if name == "decode_round_robin":
        served = [steps for turn, steps in zip(turns, waits, strict=True) if turn]
        left = [steps for turn, steps in zip(turns, waits, strict=True) if not turn]
        assert len(served) >= len(waits) / interval
        assert not left or min(served, default=0) >= max(left), "those that have waited longest"


# One request.


def test_a_request_goes_from_waiting_to_finished(tokenizer: Tokenizer) -> None:
    loop = make(tokenizer, max_batch_size=1)
    first, second = loop.add(request("a", max_new_tokens=2)), loop.add(request("b", max_new_tokens=1))
    assert (first.status, second.status) == (RequestStatus.WAITING, RequestStatus.WAITING)
    schedule = loop.scheduler.schedule()
    assert (first.status, first.is_prefilling) == (RequestStatus.RUNNING, False), "the step computes its prompt"
    assert (first.num_computed_tokens, first.num_scheduled_tokens, first.num_pending_tokens) == (0, 3, 1)
    loop.finish(schedule)
    assert (first.num_computed_tokens, first.num_pending_tokens, first.output_ids) == (3, 0, [LETTER])
    loop.processor.take()
    _, (output,) = loop.step()
    assert output == StepOutput("a", LETTER, output.text, FinishReason.LENGTH)
    assert (first.status, first.num_computed_tokens) == (RequestStatus.FINISHED, 4)
    assert loop.scheduler.pool.audit() == []
    loop.step()
    assert (second.status, loop.scheduler.has_work()) == (RequestStatus.FINISHED, False)


def test_a_step_that_was_broken_off_is_planned_again(tokenizer: Tokenizer) -> None:
    loop = make(tokenizer)
    scheduler = loop.scheduler
    add_abc(loop)
    broken_off = scheduler.schedule()
    assert names(scheduler.schedule().decoding) == "abc", "what was scheduled counts as on its way"
    scheduler.drop_in_flight()
    again = scheduler.schedule()
    assert again.entries == broken_off.entries
    loop.finish(again)
    plans = []
    for _ in range(2):
        plans.append(scheduler.schedule())
        scheduler.drop_in_flight()
    assert plans[0].entries == plans[1].entries
    assert (names(plans[0].prompts), names(plans[0].decoding)) == ("", "abc")


@pytest.mark.parametrize("num_committed", [0, 1, 2, 3])
def test_what_was_committed_before_a_step_broke_off_comes_out_with_the_next(
    tokenizer: Tokenizer, num_committed: int
) -> None:
    """Also a last token, after which no step is scheduled, and a failure: both end their request."""
    loop = make(tokenizer)
    a, b, _ = loop.add(request("a", max_new_tokens=1)), loop.add(request("b")), loop.add(request("c"))
    schedule = loop.scheduler.schedule()
    loop.commit(Schedule(schedule.step, schedule.entries[:num_committed]), errors=[b])
    loop.scheduler.drop_in_flight()
    loop.scheduler.finish(loop.processor.catch_up())
    assert "".join(loop.scheduler.running) == ("abc", "bc", "c", "c")[num_committed]
    assert loop.scheduler.pool.used_tokens == (3 if num_committed == 3 else 0)
    _, outputs = loop.step()
    got = [(o.request_id, o.finish_reason) for o in outputs]
    over = [("a", FinishReason.LENGTH), ("b", FinishReason.ERROR), ("c", None)][:num_committed]
    new = [("a", FinishReason.LENGTH), ("b", None), ("c", None)][min(num_committed, 2) :]
    assert got == over + new
    assert (a.status, a.output_ids) == (RequestStatus.FINISHED, [LETTER])


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


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_an_aborted_request_holds_nothing_and_says_nothing(tokenizer: Tokenizer, num_steps: int) -> None:
    loop = make(tokenizer, max_batch_size=1)
    loop.add(request("a", max_new_tokens=9))
    loop.add(request("b", max_new_tokens=1))
    for _ in range(num_steps):
        loop.step()
    assert loop.abort("a")
    assert not loop.abort("a")
    assert loop.scheduler.pool.audit() == []
    _, outputs = loop.step()
    assert [o.request_id for o in outputs] == ["b"], "the place is free at once"


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


def test_what_an_empty_pool_cannot_hold_is_refused_and_a_place_in_the_queue_is_free_again(tokenizer: Tokenizer) -> None:
    loop = make(tokenizer, max_batch_size=1, max_waiting_requests=2)
    for name in "ab":
        loop.add(request(name))
    loop.step()
    loop.scheduler.check("c", 3, SamplingParams())
    loop.scheduler.pool.request_capacity = 20
    with pytest.raises(RequestError, match="with its output up to 48; the KV cache holds 20 for one request"):
        loop.scheduler.check("c", 3, SamplingParams(max_new_tokens=100))
    assert (len(loop.scheduler.waiting), len(loop.scheduler.running)) == (1, 1)


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


def test_an_id_that_is_used_again_gets_no_token_of_the_request_before(tokenizer: Tokenizer) -> None:
    loop = make(tokenizer, num_in_flight=1)
    old = loop.add(request("a", max_new_tokens=9))
    loop.token_at = lambda request, index: LETTER + (request is not old) + 2 * index
    loop.step()
    loop.step()
    assert loop.abort("a")
    new = loop.add(request("a", max_new_tokens=2))
    outputs = [output for _ in range(3) for output in loop.step()[1]]
    assert [output.token_id for output in outputs] == new.output_ids == [LETTER + 1, LETTER + 3]
    assert old.output_ids == [LETTER]
    assert loop.scheduler.pool.audit() == []


def test_outputs_of_a_step_that_broke_off_are_not_those_of_a_later_request_of_that_id(tokenizer: Tokenizer) -> None:
    loop = make(tokenizer)
    loop.add(request("a"))
    loop.finish(loop.scheduler.schedule())  # and no output was taken
    assert loop.abort("a")
    loop.add(request("a", max_new_tokens=1))
    assert [(o.request_id, o.finish_reason) for o in loop.step()[1]] == [("a", FinishReason.LENGTH)]


@pytest.mark.parametrize("mode", BATCHING_MODES)
def test_steps_in_flight_that_are_dropped_are_made_again(tokenizer: Tokenizer, mode: str) -> None:
    loop = make(tokenizer, mode, num_in_flight=1)
    requests = [loop.add(request(name, max_new_tokens=4)) for name in "ab"]
    loop.token_at = lambda request, index: LETTER + index
    outputs = []
    for number in range(30):
        outputs += loop.step()[1]
        if number % 3 == 2:
            loop.in_flight.append(loop.scheduler.schedule())
            outputs += loop.break_off()
            assert not any(r.num_pending_tokens for r in requests)
    assert [r.output_ids for r in requests] == [[LETTER + n for n in range(4)]] * 2
    for name in "ab":
        assert [o.token_id for o in outputs if o.request_id == name] == [LETTER + n for n in range(4)]
    assert loop.scheduler.pool.audit() == []

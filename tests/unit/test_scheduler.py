"""Scheduling over random arrivals: order, budgets, fairness, and an end for everybody."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared.engine.draw import Drawn

from shared.cache.contiguous_pool import ContiguousKVCachePool
from shared.checkpoints.shapes import SHAPES
from shared.engine.config import BATCHING_MODES, SCHEDULER_POLICIES, EngineConfig
from shared.engine.output import StepOutput
from shared.engine.request import Request, RequestStatus, TokenLogprobs
from shared.errors import QueueFullError, RequestError
from shared.loading.config_json import parse_config
from shared.sampling.params import SamplingParams
from shared.scheduling.continuous import ContinuousScheduler
from shared.scheduling.policies import POLICIES
from shared.scheduling.scheduler import Schedule, Scheduler
from shared.scheduling.static import StaticScheduler
from shared.text.stopping import FinishReason
from shared.text.tokenizer import Tokenizer

SHAPE = parse_config(SHAPES["tiny-llama"])
MAX_SEQ_LEN = 48
SCHEDULERS = {"static": StaticScheduler, "continuous": ContinuousScheduler}
LETTER = 70  # a token of text


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoints: dict[str, Path]) -> Tokenizer:
    return Tokenizer.load(tiny_checkpoints["llama"])


def make(tokenizer: Tokenizer, mode: str = "continuous", num_regions: int | None = None, **config: object) -> Scheduler:
    settings_ = EngineConfig(batching_mode=mode, **config)
    pool = ContiguousKVCachePool(SHAPE, num_regions or settings_.max_batch_size, MAX_SEQ_LEN, torch.float32)
    return SCHEDULERS[mode](settings_, pool, tokenizer, MAX_SEQ_LEN)


def request(name: str, num_prompt_tokens: int = 3, max_new_tokens: int = 4, **params: object) -> Request:
    return Request(name, [5] * num_prompt_tokens, SamplingParams(max_new_tokens=max_new_tokens, **params), 0)


def drawn(requests: Sequence[Request], token_id: int = LETTER) -> Drawn:
    return Drawn([token_id] * len(requests))


def step(scheduler: Scheduler, token_id: int = LETTER) -> tuple[Schedule, list[StepOutput]]:
    """One step as an engine makes it, every token the same."""
    schedule = scheduler.schedule()
    outputs = scheduler.commit(schedule.prefill, drawn(schedule.prefill, token_id))
    return schedule, outputs + scheduler.commit(schedule.decode, drawn(schedule.decode, token_id))


def names(requests: Sequence[Request]) -> str:
    return "".join(r.request_id for r in requests)


def drawing(scheduler: Scheduler, num_steps: int) -> list[str]:
    """What each step prefills and decodes, as "prompts|tokens"."""
    return [f"{names(s.prefill)}|{names(s.decode)}" for s, _ in (step(scheduler) for _ in range(num_steps))]


# What each scheduler does, step by step.


def add_abc(scheduler: Scheduler) -> None:
    """Two places; a ends after 2 tokens, b after 5, c after 2."""
    for name, tokens in (("a", 2), ("b", 5), ("c", 2)):
        scheduler.add(request(name, max_new_tokens=tokens))


def test_a_static_batch_runs_until_its_last_answer_ends(tokenizer: Tokenizer) -> None:
    scheduler = make(tokenizer, "static", max_batch_size=2)
    add_abc(scheduler)
    assert drawing(scheduler, 8) == ["ab|", "|ab", "|b", "|b", "|b", "c|", "|c", "|"]


def test_continuous_batching_fills_a_place_in_the_next_step(tokenizer: Tokenizer) -> None:
    scheduler = make(tokenizer, max_batch_size=2)
    add_abc(scheduler)
    assert drawing(scheduler, 6) == ["ab|", "|ab", "c|b", "|bc", "|b", "|"]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("fcfs", ["ab|", "c|ab", "d|abc", "e|abcd", "f|abcde", "|abcdef", "|abcdef"]),
        ("prefill_first", ["ab|", "c|", "d|", "e|abcd", "f|", "|abcdef", "|abcdef"]),
        ("decode_round_robin", ["a|", "b|a", "c|a", "d|b", "e|ac", "f|bd", "|abcdef"]),
    ],
)
def test_policies_differ_in_who_decodes_beside_prompts(tokenizer: Tokenizer, policy: str, expected: list[str]) -> None:
    """The table of shared.scheduling.policies: prompts of 6, 4, and then 10 tokens a piece, a budget of 10, N = 3."""
    scheduler = make(
        tokenizer, scheduler_policy=policy, max_decode_interval=3, max_num_batched_tokens=10, max_batch_size=8
    )
    for name, length in zip("abcdef", (6, 4, 10, 10, 10, 10), strict=True):
        scheduler.add(request(name, length, max_new_tokens=20))
    assert drawing(scheduler, 7) == expected


def test_a_batch_with_too_many_prompt_tokens_starts_in_several_steps(tokenizer: Tokenizer) -> None:
    scheduler = make(tokenizer, "static", max_num_batched_tokens=10, max_batch_size=4)
    for name, length in zip("abcde", (6, 5, 30, 1, 1), strict=True):
        scheduler.add(request(name, length, max_new_tokens=9))
    assert drawing(scheduler, 5) == ["a|", "b|a", "c|ab", "d|abc", "|abcd"], "c is longer than the budget: alone"


def test_nobody_overtakes_a_request_that_does_not_fit(tokenizer: Tokenizer) -> None:
    scheduler = make(tokenizer, max_num_batched_tokens=10)
    for name, length in zip("abc", (8, 4, 1), strict=True):
        scheduler.add(request(name, length))
    assert drawing(scheduler, 2) == ["a|", "bc|a"]


@pytest.mark.parametrize("mode", BATCHING_MODES)
@pytest.mark.parametrize(("num_regions", "max_batch_size"), [(8, 2), (2, 8)])
def test_places_and_memory_each_limit_how_many_run(
    tokenizer: Tokenizer, mode: str, num_regions: int, max_batch_size: int
) -> None:
    scheduler = make(tokenizer, mode, num_regions=num_regions, max_batch_size=max_batch_size)
    for name in "abcde":
        scheduler.add(request(name))
    assert drawing(scheduler, 1) == ["ab|"]
    assert (len(scheduler.running), len(scheduler.waiting)) == (2, 3)


class Tokens(ContiguousKVCachePool):
    """Memory in which a request takes as many tokens as it was granted, of 20 for all."""

    def reserve(self, request_id: str, num_tokens: int) -> bool:
        if request_id not in self.regions and num_tokens > 20 - sum(self.granted):
            return False
        return super().reserve(request_id, num_tokens)


def test_admission_asks_for_the_prompt_and_the_longest_answer(tokenizer: Tokenizer) -> None:
    scheduler = make(tokenizer)
    scheduler.pool = Tokens(SHAPE, 16, MAX_SEQ_LEN, torch.float32)
    for name, prompt, answer in (("a", 4, 6), ("b", 2, 2), ("c", 3, 4), ("d", 1, 1)):
        scheduler.add(request(name, prompt, answer))
    # a has 10 of 20 and b 4; c wants 7, and d, who would fit, does not overtake it; b goes after two tokens.
    assert drawing(scheduler, 4) == ["ab|", "|ab", "cd|a", "|ac"]
    assert sum(scheduler.pool.granted) == 17


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
CONFIGS = st.fixed_dictionaries(
    {
        "max_batch_size": st.integers(1, 5),
        "max_num_batched_tokens": st.integers(1, 80),
    }
)
SHARING = st.fixed_dictionaries(
    {"scheduler_policy": st.sampled_from(SCHEDULER_POLICIES), "max_decode_interval": st.integers(1, 5)}
)


@dataclass
class Run:
    """A run over arrivals, with what every scheduler must keep checked in each step."""

    scheduler: Scheduler
    interval: int
    arrivals: list[Arrival]
    added: list[str] = field(default_factory=list)
    admitted: list[str] = field(default_factory=list)
    finished: dict[str, int] = field(default_factory=dict)  # the step
    served: dict[str, int] = field(default_factory=dict)  # the last step

    def go(self) -> None:
        queue = sorted(enumerate(self.arrivals), key=lambda item: item[1].before_step)
        self.by_name = {str(n): arrival for n, arrival in queue}
        number = 0
        while queue or self.scheduler.has_work():
            while queue and queue[0][1].before_step <= number:
                n, arrival = queue.pop(0)
                self.scheduler.add(request(str(n), arrival.num_prompt_tokens, arrival.max_new_tokens))
                self.added.append(str(n))
            self.step(number)
            number += 1
            assert number < 10_000, "nobody's turn comes any more"

    def step(self, number: int) -> None:
        scheduler, config = self.scheduler, self.scheduler.config
        schedule = scheduler.schedule()
        assert bool(schedule.prefill or schedule.decode) == scheduler.has_work(), "no step is lost while there is work"
        planned = [r.request_id for r in (*schedule.prefill, *schedule.decode)]
        assert len(set(planned)) == len(planned) <= len(scheduler.running) <= config.max_batch_size
        tokens = sum(len(r.prompt_ids) for r in schedule.prefill)
        assert tokens <= config.max_num_batched_tokens or len(schedule.prefill) == 1
        for name in scheduler.running:
            wanted = min(self.by_name[name].num_prompt_tokens + self.by_name[name].max_new_tokens, MAX_SEQ_LEN)
            assert scheduler.pool.reserve(name, wanted), "granted at admission, so never refused"
        for r in schedule.decode:
            assert r.status is RequestStatus.DECODE
        due = [r.request_id for r in scheduler.running.values() if r.status is RequestStatus.DECODE]
        for name in due:
            assert name in planned or number - self.served[name] < self.interval, "a token every N steps"
        self.admitted += [r.request_id for r in schedule.prefill]
        self.served |= dict.fromkeys(planned, number)
        for part in (schedule.prefill, schedule.decode):
            ids = [self.token(r) for r in part]
            for output in scheduler.commit(part, Drawn(ids)):
                if output.finish_reason is not None:
                    assert output.request_id not in self.finished
                    self.finished[output.request_id] = number
        assert scheduler.pool.used_tokens == sum(r.num_computed_tokens for r in scheduler.running.values())

    def token(self, r: Request) -> int:
        ends = self.by_name[r.request_id].ends_at == len(r.output_ids) + 1
        return min(self.scheduler.tokenizer.eos_ids) if ends else LETTER

    def check_the_end(self) -> None:
        assert self.admitted == self.added, "admitted in the order they came"
        assert set(self.finished) == set(self.added)
        assert self.scheduler.pool.audit() == []
        assert not self.scheduler.streams


@settings(max_examples=150, deadline=None)
@given(arrivals=ARRIVALS, config=CONFIGS, sharing=SHARING)
def test_continuous_whatever_arrives(tokenizer: Tokenizer, arrivals, config, sharing) -> None:
    scheduler = make(tokenizer, **config, **sharing)
    run = Run(scheduler, sharing["max_decode_interval"], arrivals)
    run.go()
    run.check_the_end()
    # Whoever is before me in the queue has so many tokens, each of which comes within N steps: then it is my turn.
    spent = 0
    for name in run.added:
        arrival = run.by_name[name]
        spent += 1 + sharing["max_decode_interval"] * min(
            arrival.max_new_tokens, MAX_SEQ_LEN - arrival.num_prompt_tokens
        )
        assert run.finished[name] <= 30 + spent


@settings(max_examples=100, deadline=None)
@given(arrivals=ARRIVALS, config=CONFIGS)
def test_static_whatever_arrives(tokenizer: Tokenizer, arrivals, config) -> None:
    run = Run(make(tokenizer, "static", **config), 1, arrivals)
    run.go()
    run.check_the_end()


@settings(max_examples=60, deadline=None)
@given(arrivals=ARRIVALS, config=CONFIGS, sharing=SHARING)
def test_no_place_stays_empty_while_somebody_waits(tokenizer: Tokenizer, arrivals, config, sharing) -> None:
    scheduler = make(tokenizer, **config, **sharing)
    plan = scheduler.schedule

    def schedule() -> Schedule:
        planned = plan()
        assert not scheduler.waiting or len(scheduler.running) == config["max_batch_size"]
        return planned

    scheduler.schedule = schedule
    Run(scheduler, sharing["max_decode_interval"], arrivals).go()


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
    scheduler = make(tokenizer, max_batch_size=1)
    first, second = request("a", max_new_tokens=2), request("b", max_new_tokens=1)
    scheduler.add(first)
    scheduler.add(second)
    assert (first.status, second.status) == (RequestStatus.WAITING, RequestStatus.WAITING)
    schedule = scheduler.schedule()
    assert (first.status, first.num_computed_tokens) == (RequestStatus.PREFILL, 0)
    scheduler.commit(schedule.prefill, drawn(schedule.prefill))
    assert (first.status, first.num_computed_tokens, first.output_ids) == (RequestStatus.DECODE, 3, [LETTER])
    _, (output,) = step(scheduler)
    assert output == StepOutput("a", LETTER, output.text, FinishReason.LENGTH)
    assert (first.status, first.num_computed_tokens) == (RequestStatus.FINISHED, 4)
    assert scheduler.pool.audit() == []
    step(scheduler)
    assert (second.status, scheduler.has_work()) == (RequestStatus.FINISHED, False)


def test_a_step_that_was_broken_off_is_planned_again(tokenizer: Tokenizer) -> None:
    scheduler = make(tokenizer)
    add_abc(scheduler)
    broken_off = scheduler.schedule()
    assert scheduler.schedule() == broken_off
    scheduler.commit(broken_off.prefill, drawn(broken_off.prefill))
    assert scheduler.schedule() == scheduler.schedule() == Schedule((), broken_off.prefill)


def test_the_end_of_sequence_and_a_stop_string_end_one_and_not_its_neighbours(tokenizer: Tokenizer) -> None:
    scheduler = make(tokenizer)
    text = tokenizer.decode([LETTER])
    scheduler.add(request("a", max_new_tokens=9))
    scheduler.add(request("b", max_new_tokens=9, stop=text))
    scheduler.add(request("c", max_new_tokens=9, ignore_eos=True))
    _, outputs = step(scheduler)
    assert [(o.request_id, o.finish_reason, o.stop) for o in outputs] == [
        ("a", None, None),
        ("b", FinishReason.STOP, text),
        ("c", None, None),
    ]
    _, outputs = step(scheduler, min(tokenizer.eos_ids))
    assert [(o.request_id, o.finish_reason) for o in outputs] == [("a", FinishReason.EOS), ("c", None)]
    assert list(scheduler.running) == ["c"]


def test_logprobs_go_to_those_who_asked(tokenizer: Tokenizer) -> None:
    scheduler = make(tokenizer)
    scheduler.add(request("a"))
    scheduler.add(request("b", logprobs=1))
    schedule = scheduler.schedule()
    asked = TokenLogprobs(-0.5, ((LETTER, -0.5),))
    first, second = scheduler.commit(schedule.prefill, Drawn([LETTER, LETTER], [None, asked]))
    assert (first.logprobs, second.logprobs) == (None, asked)


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_an_aborted_request_holds_nothing_and_says_nothing(tokenizer: Tokenizer, num_steps: int) -> None:
    scheduler = make(tokenizer, max_batch_size=1)
    scheduler.add(request("a", max_new_tokens=9))
    scheduler.add(request("b", max_new_tokens=1))
    for _ in range(num_steps):
        step(scheduler)
    assert scheduler.abort("a")
    assert not scheduler.abort("a")
    assert scheduler.pool.audit() == []
    _, outputs = step(scheduler)
    assert [o.request_id for o in outputs] == ["b"], "the place is free at once"


def test_a_failed_request_says_so_once_and_its_cause_is_logged(tokenizer: Tokenizer, caplog) -> None:
    scheduler = make(tokenizer)
    add_abc(scheduler)
    step(scheduler)
    failed = scheduler.running["a"]
    output = scheduler.fail("a", RuntimeError("out of luck"))
    assert (output.token_id, output.text, output.finish_reason) == (None, "", FinishReason.ERROR)
    assert output.error is not None
    assert "RuntimeError" in output.error
    assert "out of luck" not in output.error, "the cause is not the client's affair"
    assert "out of luck" in caplog.text
    assert failed.status is RequestStatus.FAILED
    assert "a" not in scheduler
    assert names(step(scheduler)[0].decode) == "bc"


def test_what_is_refused_leaves_no_trace(tokenizer: Tokenizer) -> None:
    scheduler = make(tokenizer, max_batch_size=1, max_waiting_requests=2)
    for name in "ab":
        scheduler.check(name, 3, SamplingParams())
        scheduler.add(request(name))
    with pytest.raises(QueueFullError, match="2 requests wait and max_waiting_requests is 2"):
        scheduler.check("c", 3, SamplingParams())
    step(scheduler)
    scheduler.check("c", 3, SamplingParams())
    for name in "ab":
        with pytest.raises(RequestError, match=f"id '{name}' is waiting or running"):
            scheduler.check(name, 3, SamplingParams())
    scheduler.pool.request_capacity = 20
    with pytest.raises(RequestError, match="with its answer up to 48; the KV memory holds 20 for one request"):
        scheduler.check("c", 3, SamplingParams(max_new_tokens=100))
    assert (len(scheduler.waiting), len(scheduler.running)) == (1, 1)

"""The penalty tables count each request's tokens, in any order of adding, stepping, preempting, failing, breaking off
and aborting, with a step in flight or none."""

from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import shared.engine.sampling.drawing as drawing_module
import shared.engine.sampling.penalty_tables as penalty_module
import shared.engine.sampling.sampler as sampler_module
from shared.cache.pool.paged import PagedKVCachePool
from shared.engine.batch import Batch
from shared.engine.config import EngineConfig
from shared.engine.request import Request
from shared.engine.runner import Launched, Runner
from shared.engine.sampling.penalty_tables import PenaltyTables
from shared.engine.sampling.sampler import SamplerOutput
from shared.models.tokens import Tokens
from shared.sampling.params import SamplingParams
from shared.sampling.sampler import SamplingBatch, SamplingRow, adjust_logits
from shared.sampling.token_counts import TokenCounts
from shared.scheduling.preemptive import PreemptiveScheduler
from shared.scheduling.schedule import Schedule
from tests.unit.test_runner import View

VOCABULARY = 7
MAX_SEQ_LEN = 24
PENALTIES: list[dict[str, float]] = [
    {},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.5},
    {"presence_penalty": -0.5, "frequency_penalty": 0.1},
]
FAILURES = st.sampled_from([0, 0, 0, 1, 2])
real_sample, real_top_logprobs = drawing_module.sample, sampler_module.top_logprobs


def counts_of(counts: TokenCounts, row: int) -> tuple[set[int], Counter[int]]:
    in_output = counts.in_output[row]
    return {*counts.in_prompt[row].nonzero().flatten().tolist()}, Counter(
        {token_id: int(in_output[token_id]) for token_id in in_output.nonzero().flatten().tolist()}
    )


class Model:
    """Logits that depend on the last token alone; ``View`` has no memory."""

    device, dtype, config = torch.device("cpu"), torch.float32, SimpleNamespace(vocab_size=VOCABULARY)
    table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0))

    def __call__(self, tokens: Tokens, kv: Any, rows: torch.Tensor | None = None) -> torch.Tensor:
        return tokens.ids if rows is None else tokens.ids[rows]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.table[hidden]


class Machine(RuleBasedStateMachine):
    """An engine's loop with a real runner, scheduler and pool, which is too small for its requests."""

    wrong: list[Any]

    @initialize(num_blocks=st.integers(4, 8), is_overlapped=st.booleans())
    def begin(self, num_blocks: int, is_overlapped: bool) -> None:
        config = EngineConfig(max_batch_size=4)
        self.pool = PagedKVCachePool(num_blocks, 2, 4, MAX_SEQ_LEN)
        self.scheduler = PreemptiveScheduler(config, self.pool, MAX_SEQ_LEN)
        self.runner = Runner(Model(), View(), 4)  # type: ignore[arg-type]
        self.is_overlapped = is_overlapped
        self.in_flight: deque[tuple[Schedule, SamplerOutput]] = deque()
        self.num_added = 0
        self.wrong = []
        self.num_checked: Counter[str] = Counter()
        self.fail_before = self.fail_after = 0  # calls that raise before sampling, and after the tokens are counted
        penalty_module.adjust_logits = self.checked_adjustment
        drawing_module.sample = self.failing_sample  # type: ignore[assignment]
        sampler_module.top_logprobs = self.failing_logprobs

    def teardown(self) -> None:
        penalty_module.adjust_logits = adjust_logits
        drawing_module.sample, sampler_module.top_logprobs = real_sample, real_top_logprobs

    def checked_adjustment(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """What the processors read is counted from the ids of the request that holds the row."""
        if batch.counts is not None:
            assert batch.count_rows is not None
            holders = {row: request for request, row in self.pool.rows.items()}
            for place in batch.count_rows.tolist():
                request = holders[place]
                expected = {*request.prompt_ids}, Counter(request.output_ids)
                if counts_of(batch.counts, place) != expected:  # an exception here would be taken for the request's
                    self.wrong.append((request, counts_of(batch.counts, place)))
                self.num_checked["rows read"] += 1
        return adjust_logits(logits, batch)

    def failing_sample(self, *args: Any, **more: Any) -> torch.Tensor:
        if self.fail_before:
            self.fail_before -= 1
            raise RuntimeError("injected")
        return real_sample(*args, **more)

    def failing_logprobs(self, *args: Any) -> Any:
        if self.fail_after:
            self.fail_after -= 1
            raise RuntimeError("injected")
        return real_top_logprobs(*args)

    @rule(
        prompts=st.lists(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=4), min_size=2, max_size=4),
        data=st.data(),
    )
    def add(self, prompts: list[list[int]], data: st.DataObject) -> None:
        for prompt in prompts:
            penalties, logprobs = data.draw(st.sampled_from(PENALTIES)), data.draw(st.sampled_from([None, 1]))
            num_new = data.draw(st.integers(1, 3)) if len(prompt) == 1 else self.pool.request_capacity - len(prompt)
            self.add_request(prompt, penalties, logprobs, num_new)

    def add_request(self, prompt: list[int], penalties: dict[str, float], logprobs: int | None, num_new: int) -> None:
        params = SamplingParams(**penalties, logprobs=logprobs, max_new_tokens=num_new)  # type: ignore[arg-type]
        self.scheduler.add(Request(str(self.num_added), prompt, params, self.num_added))
        self.num_added += 1

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if names := [*self.scheduler.running, *self.scheduler.waiting]:
            self.scheduler.abort(data.draw(st.sampled_from(names)))

    @rule(num_before=FAILURES, num_after=FAILURES, times=st.integers(1, 8))
    def step(self, num_before: int, num_after: int, times: int) -> None:
        self.fail_before, self.fail_after = num_before, num_after
        for _ in range(times):
            schedule = self.scheduler.schedule()
            self.num_checked["preempted"] += len(schedule.preempted)
            parts = (schedule,) if self.is_overlapped else (schedule.prompts, schedule.decoding)
            launched = [self.forward(part) for part in parts]
            while self.in_flight:
                self.finish(*self.in_flight.popleft())
            self.in_flight.extend((part, self.draw(part, one)) for part, one in zip(parts, launched, strict=True))
            while self.in_flight and not self.is_overlapped:
                self.finish(*self.in_flight.popleft())
            self.fail_before = self.fail_after = 0

    @rule(is_drawn=st.booleans())
    def break_off(self, is_drawn: bool) -> None:
        """A step that is interrupted before it is committed, after sampling or before; what was in flight is lost."""
        schedule = self.scheduler.schedule()
        launched = self.forward(schedule)
        while self.in_flight:
            self.finish(*self.in_flight.popleft())
        if is_drawn:
            self.draw(schedule, launched)
        self.scheduler.drop_in_flight()

    @invariant()
    def what_was_read_was_right(self) -> None:
        assert not getattr(self, "wrong", [])

    def forward(self, part: Schedule) -> Launched | None:
        return self.runner.forward(Batch.of(part, self.pool)) if part else None

    def draw(self, part: Schedule, launched: Launched | None) -> SamplerOutput:
        return self.runner.sample(launched, part.sampling_rows()) if launched else SamplerOutput(())

    def finish(self, part: Schedule, output: SamplerOutput) -> None:
        self.scheduler.commit(part, output.wait())
        complete = [r for r in self.scheduler.running.values() if len(r.output_ids) >= r.params.max_new_tokens]
        tables = self.runner.sampler.penalties
        for request in part.requests:
            place = self.pool.rows.get(request)
            if request in self.scheduler.running.values() and tables.entered.get(place, ())[:1] == (request.serial,):
                assert tables.counts is not None
                expected = {*request.prompt_ids}, Counter(request.output_ids)
                assert counts_of(tables.counts, place) == expected
                self.num_checked["rows kept"] += 1
        self.scheduler.finish(complete)


TestTables = Machine.TestCase
TestTables.settings = settings(max_examples=30, stateful_step_count=25)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_rows_are_counted_where_requests_lose_their_memory(is_overlapped: bool) -> None:
    machine = Machine()
    machine.begin(4, is_overlapped)
    try:
        for number in range(3):
            machine.add_request([number, number], PENALTIES[1 + number], 1, 6)
        machine.step(0, 0, 3)
        machine.break_off(True)
        machine.step(1, 0, 4)
        machine.step(0, 1, 8)
    finally:
        machine.teardown()
    machine.what_was_read_was_right()
    assert all(machine.num_checked[name] for name in ("rows read", "rows kept", "preempted")), machine.num_checked


def test_a_table_of_histories_is_as_wide_as_their_largest_id() -> None:
    counts = TokenCounts.of([([1, 5], [2, 2]), ([], [])])
    assert counts.in_output.shape == counts.in_prompt.shape == (2, 6)
    assert counts_of(counts, 0) == ({1, 5}, Counter({2: 2}))
    assert TokenCounts.of([([], [])]).in_output.shape == (1, 0)


def row(serial: int, prompt_ids: list[int], output_ids: list[int], **penalties: float) -> SamplingRow:
    params = SamplingParams(temperature=0.0, **penalties)  # type: ignore[arg-type]
    return SamplingRow(params, 0, len(output_ids), prompt_ids, output_ids, serial=serial)


def test_without_penalties_nothing_is_allocated_and_a_known_row_is_not_entered_again() -> None:
    uploads: list[list[int]] = []

    def upload(ids: torch.Tensor) -> torch.Tensor:
        uploads.append(ids.tolist())
        return ids

    def draw(rows: list[SamplingRow], token_ids: list[int]) -> None:
        table_rows = range(len(rows))
        tables.enter(rows, table_rows, VOCABULARY)
        tables.add(
            rows,
            table_rows,
            SamplingBatch.of_adjustments(rows, counts=tables.counts, count_rows=table_rows),
            torch.tensor(token_ids),
        )

    tables = PenaltyTables(3, torch.device("cpu"), upload)
    draw([row(0, [1], [])], [2])
    assert (tables.counts, tables.entered, uploads) == (None, {}, [])
    draw([row(0, [1], [2]), row(1, [4, 4], [], frequency_penalty=1.0)], [2, 5])
    assert tables.counts is not None
    assert tables.counts.num_bytes == 3 * VOCABULARY * 5
    assert uploads == [[4, 4], []]
    addresses = tables.counts.in_prompt.data_ptr(), tables.counts.in_output.data_ptr()
    draw([row(0, [1], [2, 2]), row(1, [4, 4], [5], frequency_penalty=1.0)], [2, 5])
    assert uploads == [[4, 4], []]
    assert counts_of(tables.counts, 1) == ({4}, Counter({5: 2}))
    draw([row(2, [6], [0, 0], presence_penalty=1.0)], [3])  # another request in the row of the first
    assert uploads == [[4, 4], [], [6], [0, 0]]
    assert counts_of(tables.counts, 0) == ({6}, Counter({0: 2, 3: 1}))
    assert addresses == (tables.counts.in_prompt.data_ptr(), tables.counts.in_output.data_ptr())


def test_an_older_row_of_a_request_that_moved_is_not_believed() -> None:
    """It counts as many outputs, one of them from a step that was dropped."""
    tables = PenaltyTables(2, torch.device("cpu"), lambda ids: ids)

    def draw(place: int, outputs: list[int], token_id: int) -> None:
        rows = [row(0, [1], outputs, frequency_penalty=1.0)]
        tables.enter(rows, [place], VOCABULARY)
        batch = SamplingBatch.of_adjustments(rows, counts=tables.counts, count_rows=[place])
        tables.add(rows, [place], batch, torch.tensor([token_id]))

    draw(0, [2], 3)  # dropped, and the request preempted
    draw(1, [2], 4)
    draw(0, [2, 4], 5)
    assert tables.counts is not None
    assert counts_of(tables.counts, 0) == ({1}, Counter([2, 4, 5]))
    for _ in range(2):  # sampling fails the first time, so nothing is added
        tables.enter([row(0, [1], [2, 4, 5, 6], frequency_penalty=1.0)], [0], VOCABULARY)
    assert counts_of(tables.counts, 0) == ({1}, Counter([2, 4, 5, 6]))


@pytest.mark.parametrize("num_accepted", [0, 1, 2])
def test_rows_with_drafts_count_them_and_are_not_believed(num_accepted: int) -> None:
    """Of the accepted drafts the first row learns without another look at the whole text."""
    uploads: list[list[int]] = []

    def upload(ids: torch.Tensor) -> torch.Tensor:
        uploads.append(ids.tolist())
        return ids

    def draw(
        outputs: list[int], drafts: list[int], token_ids: list[int], first: int = 3
    ) -> list[tuple[set[int], Counter[int]]]:
        params = SamplingParams(frequency_penalty=1.0)
        rows = [
            SamplingRow(params, 0, len(outputs) + n, [1], outputs + drafts[:n], serial=4, num_drafts=n)
            for n in range(len(drafts) + 1)
        ]
        table_rows = [first + n for n in range(len(rows))]
        tables.enter(rows, table_rows, VOCABULARY)
        assert tables.counts is not None
        seen = [counts_of(tables.counts, row) for row in table_rows]
        batch = SamplingBatch.of_adjustments(rows, counts=tables.counts, count_rows=table_rows)
        tables.add(rows, table_rows, batch, torch.tensor(token_ids))
        return seen

    tables = PenaltyTables(6, torch.device("cpu"), upload)
    drawn = [3] * num_accepted + [6] * (3 - num_accepted)
    assert draw([2], [3, 3], drawn) == [({1}, Counter([2, *[3] * n])) for n in range(3)]
    outputs = [2, *drawn[: num_accepted + 1]]
    uploads.clear()
    assert draw(outputs, [6, 2], [0, 0, 0]) == [({1}, Counter([*outputs, *[6, 2][:n]])) for n in range(3)]
    assert [1] not in uploads, "the prompt is entered once"
    outputs += [0, 0]
    assert draw(outputs, [], [0], first=4) == [({1}, Counter(outputs))], "a row that was after a draft"

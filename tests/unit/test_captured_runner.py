"""Steps that are replayed: what is captured, what a step reads from it, and what runs eagerly instead."""

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from shared.cache.pool.contiguous import ContiguousKVCachePool
from shared.cache.view.interface import StepInputs, step_arrays
from shared.engine.batch import Batch, PromptRows
from shared.engine.executor import graphs
from shared.engine.executor.buckets import Bucket, Buckets
from shared.engine.executor.captured import Captured
from shared.engine.executor.graphs import CapturedStep, Computed, DrawRecorder
from shared.engine.executor.last_ids import LastIds
from shared.engine.request import Request
from shared.engine.runner import Runner
from shared.errors import ConfigError
from shared.sampling.params import SamplingParams
from shared.sampling.sampler import SamplingBatch
from shared.scheduling.schedule import Schedule, Scheduled
from tests.unit.test_runner import Step, Successor

BUCKETS = Buckets.of(4, 12)


class Fixed:
    """Loads a batch into buffers of fixed addresses, padded to its bucket, and has no memory."""

    num_bytes = 0

    def __init__(self, is_required: bool = False) -> None:
        self.buckets, self.bucket = replace(BUCKETS, is_required=is_required), None
        self.paddings = [padding(bucket) for bucket in reversed(BUCKETS.decode + BUCKETS.mixed)]
        self.buffers = {name: torch.zeros(32, dtype=torch.int64) for name in step_arrays(self.paddings[0])}

    def load(self, batch: Batch) -> StepInputs:
        self.bucket = BUCKETS.smallest(len(batch), batch.num_tokens)
        arrays = {name: torch.from_numpy(array) for name, array in step_arrays(batch).items()}
        if self.bucket is not None:
            for name in ("token_ids", "positions"):
                arrays[name] = torch.nn.functional.pad(arrays[name], (0, self.bucket.num_tokens - batch.num_tokens))
            if not self.bucket.is_decode:
                rows = arrays["logit_rows"]
                arrays["logit_rows"] = torch.nn.functional.pad(rows, (0, self.bucket.num_tokens - len(rows)))
        return StepInputs.of({name: self.buffers[name][: len(array)].copy_(array) for name, array in arrays.items()})

    def advance(self) -> None:
        self.buffers["token_ids"] += 1  # as if the sampled tokens were computed next


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def batch_of(tokens: dict[str, list[int]], pool: ContiguousKVCachePool | None = None, samples: int = 1) -> Batch:
    """A batch of new requests, each with logit rows for its last ``samples`` tokens; the last id may be None: in
    flight."""
    pool = pool or ContiguousKVCachePool(4, 20)
    entries = []
    for name, ids in tokens.items():
        request = Request(name, ids, SamplingParams(temperature=0.0), 0)
        assert pool.reserve(request, 20)
        entries.append(Scheduled(request, 0, len(ids), 0, samples))
    return Batch.of(Schedule(1, tuple(entries)), pool)


def padding(bucket: Bucket) -> Batch:
    if bucket.is_decode:
        return batch_of({str(n): [0] for n in range(bucket.num_tokens)}, samples=0)
    return batch_of({"0": [0] * bucket.num_tokens}, samples=0)


class Recorded:
    """A capture that repeats a function, and whose results are always in the same memory."""

    def __init__(self, fails_after: int = 99) -> None:
        self.num_captured, self.fails_after = 0, fails_after

    def __call__(self, run: Callable[[], Computed]) -> CapturedStep:
        if self.num_captured == self.fails_after:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.num_captured += 1
        results = Computed(*(None if tensor is None else tensor.clone() for tensor in run()))  # type: ignore[arg-type]

        def replay() -> None:
            for kept, tensor in zip(results, run(), strict=True):
                if kept is not None and tensor is not None:
                    kept.copy_(tensor)

        return CapturedStep(replay, results)


def make(
    capture: Recorded | None = None, view: Any = None, model: Any = None, most_logit_rows: int = 1, **options: Any
) -> Any:
    options |= {"executor": partial(Captured, capture=capture or Recorded()), "last_ids": LastIds}
    return Runner(model or Successor(), view or Fixed(), 4, most_logit_rows, **options)  # type: ignore[arg-type]


def test_every_bucket_is_captured_the_largest_first() -> None:
    runner = make()
    assert list(runner.executor.graphs) == [Bucket(12, 4, False), *(Bucket(n, n, True) for n in (4, 2, 1))]


@pytest.mark.parametrize("num_sequences", [1, 2, 3, 4])
def test_a_decode_step_is_one_replay_and_its_logits_are_those_of_its_sequences(num_sequences: int) -> None:
    runner = make()
    batch = batch_of({str(n): [10 * (n + 1)] for n in range(num_sequences)})
    launched = runner.forward(batch)
    assert launched.logits.argmax(-1).tolist() == [10 * (n + 1) + 1 for n in range(num_sequences)]
    assert (runner.num_replays, runner.num_forwards) == (1, 1)
    assert len(runner.model.seen[-1]) == BUCKETS.smallest(num_sequences, num_sequences).num_tokens


@pytest.mark.parametrize("most_logit_rows", [1, 3])
def test_a_mixed_step_has_logits_for_its_last_tokens_alone(most_logit_rows: int) -> None:
    """Whether its graph ends with the tokens that may be sampled from, or with all."""
    runner = make(most_logit_rows=most_logit_rows)
    launched = runner.forward(batch_of({"a": [10], "b": [20, 21, 22], "c": [30, 31]}))
    assert launched.logits.argmax(-1).tolist() == [11, 23, 32]
    assert runner.num_replays == 1
    for samples, expected in ((0, []), (3, [2, 3, 4])):
        launched = runner.forward(batch_of({"a": [1, 2, 3]}, samples=samples))
        assert not launched.errors
        assert (launched.logits.argmax(-1).tolist(), launched.logits.dtype) == (expected, torch.float32)


def test_a_mixed_graph_ends_with_the_rows_that_may_be_sampled_from_if_nothing_else_is_read() -> None:
    """Where these are most of the rows, or an observer reads all of them, it computes all."""
    mixed, scored = BUCKETS.mixed[0], batch_of({"a": [10, 11, 12], "b": [20]})
    rows = PromptRows(*(np.array(each) for each in ([0, 1], [0, 0], [11, 12], [1, 1])))
    observer = SimpleNamespace(begin=lambda: None, computed=lambda batch, hidden: seen.append(len(hidden)))
    seen: list[int] = []
    for options, num_rows in (({}, 4), ({"most_logit_rows": 2}, 12), ({"observers": [observer]}, 12)):
        runner = make(**options)
        assert len(runner.executor.graphs[mixed].results.hidden) == num_rows
        runner.forward(scored)
        assert runner.num_replays == 1
        launched = runner.forward(replace(scored, prompt_rows=rows))
        assert launched.logits.argmax(-1).tolist() == [13, 21]
        assert [scores.draws.logprobs[2].tolist() for scores in launched.prompts] == [[[11], [12]]]
        assert runner.num_replays == 1 + (num_rows == 12), "a scored prompt needs all"
    assert seen == [12, 12]


def test_a_decode_step_of_which_some_sequences_sample_nothing() -> None:
    """A chunk of one token that is not its prompt's last."""
    batch = batch_of({"a": [10], "b": [20], "c": [30]})
    chosen = Batch(**{**vars(batch), "logit_rows": batch.logit_rows[1:], "logit_sequences": batch.logit_sequences[1:]})
    assert make().forward(chosen).logits.argmax(-1).tolist() == [21, 31]


def test_a_decode_step_is_repeated_within_the_tokens_that_it_was_laid_out_for() -> None:
    runner, batch = make(), batch_of({"a": [10], "b": [20], "c": [30]})
    ahead = replace(batch, layout=replace(batch.layout, num_ahead=2))
    launched = runner.forward(ahead)
    for n in (1, 2):
        launched = runner.repeat(launched) or pytest.fail("it is not repeated")
        assert launched.logits.argmax(-1).tolist() == [11 + n, 21 + n, 31 + n]
    assert runner.repeat(launched) is None
    assert (runner.num_replays, runner.num_forwards, runner.num_tokens_computed) == (3, 3, 9)
    assert runner.repeat(runner.forward(batch)) is None, "no further token was laid out"
    mixed = batch_of({"a": [10, 11]})
    assert runner.repeat(runner.forward(replace(mixed, layout=replace(mixed.layout, num_ahead=2)))) is None
    runner.ranks.can_repeat = False
    assert runner.repeat(runner.forward(ahead)) is None, "other ranks learn of a step only through a batch"


def test_a_replayed_step_begins_with_the_ids_in_flight() -> None:
    step = Step(3, lambda model, *_: make(model=model))
    step.run([0, 1, 2])
    assert (step.run([2, 0]).token_ids, step.runner.num_replays) == ([32, 12], 2)


def test_a_step_larger_than_every_bucket_runs_eagerly_and_is_counted() -> None:
    runner = make()
    assert runner.forward(batch_of({"a": [5] * 9, "b": [6] * 9})).logits.argmax(-1).tolist() == [6, 7]
    assert (runner.num_replays, runner.num_forwards) == (0, 1)


def test_a_capture_that_fails_leaves_a_runner_that_runs_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    runner = make(Recorded(fails_after=2))
    assert "steps run eagerly" in caplog.text
    assert "operation not permitted when stream is capturing" in caplog.text
    assert runner.executor.graphs == {}
    assert runner.forward(batch_of({"a": [10], "b": [20]})).logits.argmax(-1).tolist() == [11, 21]
    assert runner.num_replays == 0


def test_graphs_that_are_asked_for_are_captured_or_refused() -> None:
    view: Any = Fixed(is_required=True)
    says = (
        r"^use_cuda_graphs is True and CUDA graphs could not be captured \(operation not permitted .*\); leave it out"
    )
    with pytest.raises(ConfigError, match=says):
        make(Recorded(fails_after=2), view)
    assert make(view=view).executor.graphs


@pytest.mark.failing_forwards
def test_a_failing_part_leaves_the_results_of_the_others() -> None:
    """The parts of a batch are replayed one after the other, and write to the same memory."""
    runner = make()
    runner.model.failing = {30}
    launched = runner.forward(batch_of({"a": [10], "b": [20], "c": [30], "d": [40]}))
    assert launched.logits.argmax(-1).tolist() == [11, 21, 41]
    assert list(launched.errors) == [2]
    assert launched.sequence_rows.tolist() == [0, 1, 3]


def test_draws_that_cannot_be_recorded_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling within a recording is part of it; logits that no captured step writes move."""
    logits, rows, is_capturing = torch.zeros(1, 8), torch.zeros(1, dtype=torch.int64), False
    launched, attempts = list[int](), list[int]()

    def record(*_: Any) -> graphs.RecordedDraw:
        attempts.append(len(launched))
        raise RuntimeError("injected")

    def draw(places: set[int]) -> None:
        recorder.addresses = places
        recorder(logits, SamplingBatch(1), lambda: launched.append(1) or rows, ())

    monkeypatch.setattr(graphs.RecordedDraw, "of", record)
    monkeypatch.setattr(graphs, "NUM_BEFORE", 3)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    recorder, fixed = DrawRecorder(set()), {logits.data_ptr()}
    for _ in range(5):
        draw(set())
    is_capturing = True
    for _ in range(5):
        draw(fixed)
    assert (len(launched), attempts) == (10, [])
    is_capturing = False
    for _ in range(6):
        draw(fixed)
    assert (len(launched), attempts) == (16, [13]), "a failure to record is the last attempt"


def test_a_recorded_draw_is_repeated_for_its_kind_and_size_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids that were given stay as they are, and all recordings are dropped when there are more than are kept."""
    logits, rows = torch.zeros(2, 8), torch.zeros(1)
    kinds = [dict[str, Any](), {"temperature": rows}, {"log_min_p": rows}, {"top_k": rows}, {"top_p": rows}]
    draws = [(logits, kind, (None,)) for kind in kinds] + [(logits[:1], {}, (None,)), (logits, {}, (5,))]
    recorded = list[str]()

    def record(launch: Callable[[], torch.Tensor], pool: str) -> Any:
        ids = launch().clone()
        recorded.append(pool)
        return SimpleNamespace(replay=lambda: ids.copy_(launch())), ids

    pools = iter("ab")
    monkeypatch.setattr(graphs, "recorded", record)
    monkeypatch.setattr(graphs, "NUM_BEFORE", 2)
    monkeypatch.setattr(graphs, "MOST_RECORDED", len(draws) - 1)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    recorder, given = DrawRecorder({logits.data_ptr()}), list[torch.Tensor]()
    for number, (each, kind, sizes) in enumerate(draws):
        draw = partial(torch.full, (1,), number)
        for shift in range(4):
            batch = SamplingBatch(len(each), **kind)
            given.append(recorder(each, batch, lambda draw=draw, shift=shift: draw() + 10 * shift, sizes))
        known = [one for one in recorder.known.values() if isinstance(one, graphs.RecordedDraw)]
        assert known[-1].ids.data_ptr() not in {ids.data_ptr() for ids in given}
        assert known[-1].replay().item() == number + 20, "the launches that were recorded are run"
    assert [ids.item() for ids in given[::4]] == [*range(len(draws))]
    assert [ids.item() for ids in given[3::4]] == [number + 20 for number in range(len(draws))]
    assert (recorded, len(recorder.known)) == (["a"] * (len(draws) - 1) + ["b"], 1)


@pytest.mark.parametrize("was_collecting", [True, False])
def test_no_garbage_is_collected_during_a_capture(was_collecting: bool) -> None:
    garbage = Recorded()
    freed, garbage.own = weakref.ref(garbage), garbage  # type: ignore[attr-defined]
    del garbage
    (gc.enable if was_collecting else gc.disable)()
    try:
        with contextlib.suppress(RuntimeError), graphs.uncollected():
            assert freed() is None, "garbage of an earlier engine is freed before"
            assert not gc.isenabled()
            raise RuntimeError
        assert gc.isenabled() == was_collecting
    finally:
        gc.enable()

"""Steps that are padded to buckets and replayed give what steps of their own size give."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from phases.phase_09.engine import Engine
from phases.phase_11.engine import Engine as Speculative
from phases.phase_11_1.engine import Engine as MultiToken
from shared.cache.view.bucket_padding import buckets_of
from shared.engine.batch import Batch
from shared.engine.executor import graphs
from shared.engine.executor.buckets import Bucket, Buckets
from shared.engine.executor.graphs import Computed, CudaGraphCapture, DrawRecorder, RecordedDraw
from shared.engine.sampling.sampler import Sampler
from shared.kernels.attention.kv_write import kv_write_kernel
from shared.kernels.launch import INTERPRETED, LAUNCHES
from shared.kernels.sampling.next_token import next_token
from shared.kernels.sampling.pending_ids import fill_pending
from shared.sampling.params import SamplingParams
from shared.sampling.sampler import SamplingRow
from shared.scheduling.chunks import even_share
from shared.scheduling.schedule import Schedule
from shared.tracks.multi_token.captured_head import CapturedHead
from shared.tracks.multi_token.drafter import ids_of_guesses
from shared.tracks.multi_token.mask_states import MaskObserver
from tests.adapters import random_adapter_of
from tests.kernels.engines import REQUESTS, Repeat, captured_runner, make_engine, show_drafts
from tests.mixed_requests import seen, serve

pytestmark = pytest.mark.usefixtures("only_the_caches_kernels")
ON_GPU = pytest.mark.gpu
PLAIN: dict[str, Any] = {"use_cuda_graphs": False, "attention_backend": "sdpa"}  # attention in PyTorch's operations


@pytest.mark.parametrize("family", [pytest.param("llama", marks=ON_GPU), "gemma3_text"])
def test_replayed_steps_give_the_same_tokens(tiny_checkpoints, family):
    """Chunks beside decoding, shared prefixes, preemption, penalties and log-probabilities; one step in flight."""
    plain = make_engine(tiny_checkpoints[family], **PLAIN)
    expected, _ = serve(plain, REQUESTS)
    engine = make_engine(tiny_checkpoints[family], overlap_scheduling=True)
    got, _ = serve(engine, REQUESTS)
    assert [[o.token_id for o in answer] for answer in got] == [[o.token_id for o in answer] for answer in expected]
    assert {bucket.is_decode for bucket in engine.runner.executor.graphs} == {True, False}
    assert engine.runner.num_replays > 10
    assert engine.runner.num_forwards - engine.runner.num_replays <= 2, "two prompts that begin together"
    assert engine.scheduler.num_preemptions > 0
    if not INTERPRETED:
        eager = make_engine(tiny_checkpoints[family])
        eager.runner.executor.graphs.clear()
        assert seen(serve(eager, REQUESTS)[0]) == seen(got), "the same launches in the same buckets, bit for bit"


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3_text", marks=ON_GPU)])
def test_replayed_steps_verify_drafts(tiny_checkpoints, family):
    """A step with drafts is one of a mixed bucket, with several logit rows a request; others beside it have none."""
    plain = make_engine(tiny_checkpoints[family], **PLAIN)
    expected, _ = serve(plain, REQUESTS)
    lookup: dict[str, Any] = {"use_speculative_decoding": True, "drafter": "ngram", "adapt_spec_length": False}
    engine = make_engine(tiny_checkpoints[family], Speculative, overlap_scheduling=True, **lookup)
    commit, steps = engine.scheduler.commit, []

    def watched(schedule: Schedule, sampled: Any) -> None:
        steps.append((schedule.has_drafts, engine.view.bucket in engine.runner.executor.graphs))
        before = sum(request.num_accepted_drafts for request in schedule.requests)
        commit(schedule, sampled)
        num_accepted.append(sum(request.num_accepted_drafts for request in schedule.requests) - before)

    num_accepted: list[int] = []
    engine.scheduler.commit = watched
    got, _ = serve(engine, REQUESTS)
    assert [[o.token_id for o in answer] for answer in got] == [[o.token_id for o in answer] for answer in expected]
    assert steps.count((True, True)) > 1
    assert sum(num_accepted) > 1
    assert engine.runner.num_forwards < plain.runner.num_forwards


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3_text", marks=ON_GPU)])
def test_replayed_steps_have_mask_tokens(tiny_checkpoints, family):
    """Nine tokens verify two guesses and make the next ones; the guesses are those of steps that are not captured.

    Of greedy requests they are made after every token of a step, right after it; with a sampled one, as usual.
    """
    greedy, drawn = REQUESTS[0][1], {"seed": 2, "max_new_tokens": 4, "ignore_eos": True}
    short = greedy | {"max_new_tokens": 8}
    folder, requests = tiny_checkpoints[family], [([5, 9] * 3, greedy), ([7], short), ([3] * 6, drawn)]
    expected, _ = serve(make_engine(folder, **PLAIN), requests)
    settings: dict[str, Any] = {"use_speculative_decoding": True, "adapter": str(random_adapter_of(folder))}
    settings |= {"adapt_spec_length": False, "spec_length": 2, "prefill_chunk_size": 18}
    guessed: list[list[list[int]]] = []
    num_ahead: list[int] = []
    for captures in (False, True):
        engine = make_engine(folder, MultiToken, **settings, use_cuda_graphs=None if captures else False)
        if captures:
            drafter, most_rows = engine.drafter, engine.pool.max_sequences
            observers = [MaskObserver(drafter.states, noted(drafter, num_ahead))]
            sizes = most_rows, engine.config.most_logit_rows
            options = {"last_ids": ids_of_guesses, "observers": observers}
            engine.runner = captured_runner(engine.model, engine.view, *sizes, **options)
            if INTERPRETED:
                drafter.logits = drafter.captured = CapturedHead(drafter.adapter, engine.model, most_rows, Repeat())
            show_drafts(engine)
        propose, collect = engine.drafter.propose, engine.drafter.collect
        found: list[list[int]] = []

        def noting(schedule: Schedule, propose: Any = propose, collect: Any = collect, found: Any = found) -> None:
            propose(schedule)
            collect()
            found += [list(request.draft_ids) for request in schedule.requests if request.draft_ids]

        engine.drafter.propose = noting
        got, _ = serve(engine, requests)
        assert [[o.token_id for o in answer] for answer in got] == [[o.token_id for o in answer] for answer in expected]
        guessed.append(found)
        assert (engine.runner.num_replays > 8) == captures
    assert sum(map(len, guessed[0])) > 12
    assert guessed[0] == guessed[1]
    assert {0, 3, 6} <= set(num_ahead), "none beside the request that is drawn; after the tokens of one, and of two"


def noted(drafter: Any, num_ahead: list[int]) -> Any:
    """``follow`` of a drafter; notes the rows after which drafts are made ahead."""

    def follow(*settings: Any) -> None:
        drafter.follow(*settings)
        num_ahead.append(0 if drafter.ahead is None else len(drafter.ahead.ids) // drafter.ahead.k)

    return follow


@pytest.mark.parametrize(
    ("family", "is_same"), [("llama", True), ("llama", False), pytest.param("gemma3_text", False, marks=ON_GPU)]
)
def test_drafts_behind_each_other_are_moved_on_by_the_device(tiny_checkpoints, family, is_same):
    """A draft model that is the model itself, whose drafts are all right, and one with other layers."""
    folder = tiny_checkpoints[family]
    expected, _ = serve(make_engine(folder, **PLAIN), REQUESTS[:2])
    drafting: dict[str, Any] = {"use_speculative_decoding": True, "draft_model": str(folder), "spec_length": 4}
    engine = make_engine(folder, Speculative, adapt_spec_length=False, num_gpu_blocks=24, **drafting)
    drafter = engine.drafter
    drafter.model.blocks = engine.model.blocks if is_same else drafter.model.blocks[:2]
    runner = drafter.runner = captured_runner(drafter.model, drafter.runner.view, drafter.pool.max_sequences)
    answers, repeat = [], runner.repeat
    runner.repeat = lambda launched: answers.append(repeat(launched)) or answers[-1]  # type: ignore[func-returns-value]
    for memory in (runner.view.keys, runner.view.values):  # type: ignore[attr-defined]
        memory.fill_(float("nan"))
    got, _ = serve(engine, REQUESTS[:2])
    assert [[o.token_id for o in answer] for answer in got] == [[o.token_id for o in answer] for answer in expected]
    num_repeats = sum(answer is not None for answer in answers)
    assert num_repeats > 5
    stats = engine.stats()
    assert stats["drafts accepted (tokens)"] > (15 if is_same else 0)
    assert stats["drafts rejected (tokens)"] > 0 or is_same
    assert runner.num_forwards - runner.num_replays <= 2


def test_a_replay_launches_what_the_largest_step_of_its_bucket_needs(tiny_checkpoints):
    """The launches of a layer do not depend on how many of the sequences decode, nor on the lengths."""
    engine = make_engine(tiny_checkpoints["llama"])
    view = engine.view
    assert list(engine.runner.executor.graphs) == [Bucket(12, 3, False), *(Bucket(n, n, True) for n in (3, 2, 1))]
    counts = []
    for new in ([1, 1, 9], [4], [1, 7]):
        LAUNCHES.clear()
        engine.model(view.load(batch_of(engine, new)).tokens, view)
        counts.append(dict(LAUNCHES))
        assert LAUNCHES[kv_write_kernel.__name__] == len(engine.model.blocks)
    assert counts[0] == counts[1] == counts[2]
    asked = make_engine(tiny_checkpoints["llama"], use_cuda_graphs=True)
    assert (view.buckets.is_required, asked.view.buckets.is_required) == (False, True)


@pytest.mark.parametrize(("max_seq_len", "most"), [(12, 10), (8, 8)])  # a chunk has 9 tokens, a block 4
def test_the_padding_of_a_chunk_takes_no_more_blocks_than_a_sequence(tiny_checkpoints, max_seq_len, most):
    engine = make_engine(tiny_checkpoints["llama"], max_seq_len=max_seq_len, max_batch_size=1)
    assert list(engine.runner.executor.graphs) == [Bucket(most, 1, False), Bucket(1, 1, True)]


def batch_of(engine: Engine, num_new: list[int]) -> Batch:
    """New tokens of requests, in the first blocks of the pool; not a step that a scheduler would make."""
    from tests.steps import make_request, step_of

    requests = {make_request(str(n), [n + 1] * count): count for n, count in enumerate(num_new)}
    for request, count in requests.items():
        engine.pool.admit(request)
        assert engine.pool.reserve(request, count)
    batch = Batch.of(step_of(requests), engine.pool)
    for request in requests:
        engine.pool.release(request)
    return batch


@pytest.mark.parametrize("num_new", [[1], [1, 1, 1], [1, 1, 9], [5, 4]])
def test_padding_changes_no_hidden_state(tiny_checkpoints, num_new):
    engine, plain = (
        make_engine(tiny_checkpoints["qwen3"]),
        make_engine(tiny_checkpoints["qwen3"], use_cuda_graphs=False),
    )
    with torch.inference_mode():
        (hidden, rows), (expected, ends) = (
            (each.model(inputs.tokens, each.view), inputs.logit_rows.tolist())
            for each in (engine, plain)
            for inputs in [each.view.load(batch_of(each, num_new))]
        )
    T = sum(num_new)
    num_padded = T if len(num_new) == T else 12
    assert (len(expected), len(hidden)) == (T, num_padded)
    assert rows == ends + [0] * (len(rows) - len(ends))
    assert len(rows) == (len(ends) if len(num_new) == T else 12), "a graph of a mixed step reads any number of them"
    torch.testing.assert_close(hidden[:T], expected, rtol=1e-5, atol=1e-5)
    assert engine.view.keys.isnan().sum() == plain.view.keys.isnan().sum()  # type: ignore[attr-defined]


def test_a_step_that_fits_no_bucket_runs_eagerly_and_is_counted(tiny_checkpoints):
    """Two chunks of 9 are more than the 12 tokens of the largest bucket."""
    requests = [([2] * 9, {"temperature": 0.0, "max_new_tokens": 2}), ([3] * 9, {"max_new_tokens": 2, "seed": 1})]
    engine = make_engine(tiny_checkpoints["llama"])
    got, _ = serve(engine, requests)
    expected, _ = serve(make_engine(tiny_checkpoints["llama"], **PLAIN), requests)
    assert [[o.token_id for o in answer] for answer in got] == [[o.token_id for o in answer] for answer in expected]
    assert engine.runner.num_forwards - engine.runner.num_replays == 1


def test_pending_ids_are_filled_in_and_others_kept(device):
    last_ids = torch.arange(100, 108, device=device)
    ids = torch.tensor([5, -1, 7, -8, 0, -3] * 40, device=device)
    fill_pending(ids, last_ids)
    assert ids.tolist() == [5, 100, 7, 107, 0, 102] * 40


def test_each_sequence_moves_on_by_a_token_and_padding_stays(device):
    arrays = [[7, 8, 0], [5, 3, 0], [50, 31, -1], [6, 4, 0], [0, 2, 0], [9, 2, 5, 3], [4, 1, 0]]
    dtypes = [torch.int64] * 3 + [torch.int32] * 3 + [torch.int64]
    sent = [torch.tensor(array, dtype=dtype, device=device) for array, dtype in zip(arrays, dtypes, strict=True)]
    next_token(*sent, block_size=4, stride=10)
    moved = [[-5, -2, 0], [6, 4, 0], [100, 120, -1], [7, 5, 0]]
    assert [array.tolist() for array in sent] == moved + arrays[4:]


def test_plans_of_prompts_are_kept_until_another_number_of_sequences_decodes(tiny_checkpoints):
    planner = make_engine(tiny_checkpoints["llama"]).view.attention.planner
    plans = [planner.plan(np.array([1] * n + [9]), np.array([4] * n + [9]), n).prefill for n in (1, 1, 2)]
    assert plans[0] is plans[1]
    assert plans[1] is not plans[2]
    assert len(planner.last_prefill) == len(planner.last_decode) == 1, "the last one alone"
    planner = replace(planner, buckets=Buckets.of(4, 64), grids={})
    planner.plan(np.ones(3, np.int64), np.full(3, 9), 3)
    assert [*planner.grids] == [4], "the grid of the launch, which is that of the bucket"
    for num_new in (5, 41):  # one tile, and several
        for num_tokens in range(num_new, num_new + 200):
            step = np.array([1, num_new]), np.array([4, num_tokens]), 1
            kept, fresh = (each.plan(*step).prefill[None] for each in (planner, replace(planner, last_prefill={})))
            assert [each.tolist() for each in kept.arrays()] == [each.tolist() for each in fresh.arrays()], num_tokens
    engine = make_engine(tiny_checkpoints["gemma3_text"])
    planner, config = engine.view.attention.planner, replace(engine.config, prefill_chunk_size=500)
    assert buckets_of(config, engine.model, 48).mixed[-1].num_tokens == 3 * 48, "of three sequences"
    for channels, most_tokens in ((2048, 6144), (2049, 2048)):
        model = SimpleNamespace(norm=engine.model.norm, config=replace(engine.model.config, hidden_size=channels))
        default = replace(engine.config, prefill_chunk_size=None)
        assert buckets_of(default, model, 8192).mixed[-1].num_tokens == most_tokens + 3
    assert max(even_share(n) for n in range(20_000)) <= 6144, "a narrow model captures every default chunk"
    first, second = (planner.plan(np.array([1, 9]), np.array([4, n]), 1).prefill for n in (40, 41))
    assert first is not second, "with a window a plan depends on each key"


@pytest.mark.gpu
def test_graphs_share_memory_and_results_are_where_they_were(device):
    """Results are kept as addresses, so a later capture may use them; each is right after its own replay."""
    capture, x = CudaGraphCapture(device), torch.ones(1 << 20, device=device)
    steps = [capture(lambda n=n: Computed((x * n).bfloat16()[: 1 << (20 - n)])) for n in range(1, 6)]  # type: ignore[misc]
    x.fill_(3.0)
    for n, step in enumerate(steps, start=1):
        step.replay()
        assert (step.results.hidden == 3 * n).all()
        assert step.results.hidden.shape == (1 << (20 - n),)


@pytest.mark.gpu
@pytest.mark.parametrize("limits", [{}, {"top_p": 0.9}, {"top_k": 20, "min_p": 0.01}, {"temperature": 0.0}])
def test_recorded_draws_are_those_that_are_launched(device, limits, monkeypatch):
    """Rows come and go, their parameters and logits change, and a graph reads those of its own draw; the third size
    drops what is recorded of the others, and is recorded itself."""
    monkeypatch.setattr(graphs, "NUM_BEFORE", 3)
    monkeypatch.setattr(graphs, "MOST_RECORDED", 2)
    plain, recording = Sampler(device, 8), Sampler(device, 8)
    logits, ids = torch.empty(8, 5000, device=device, dtype=torch.bfloat16), []
    recording.recorder = recorder = DrawRecorder({logits.data_ptr()})
    for step in range(40):
        logits.copy_(torch.randn(logits.shape, device=device))
        num_rows = 3 if step >= 30 else 8 if step % 3 else 5
        settings = {"temperature": 0.5 + step // 10} | limits
        rows = [SamplingRow(SamplingParams(**settings), seed=n, index=step) for n in range(num_rows)]
        drawn = [each.sample(logits[:num_rows], rows, range(num_rows)).ids for each in (plain, recording)]
        assert torch.equal(*drawn)
        ids.append((drawn[1], drawn[1].clone()))
    assert all(torch.equal(*pair) for pair in ids), "later draws leave ids as they are"
    assert [isinstance(known, RecordedDraw) for known in recorder.known.values()] == [True]

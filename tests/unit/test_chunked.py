"""Chunked prefill: which tokens of which prompts a step computes, and who samples."""

from pathlib import Path

import pytest

from shared.cache.pool.paged import PagedKVCachePool
from shared.engine.config import EngineConfig
from shared.engine.request import Request
from shared.lessons import find_lesson, lessons
from shared.loading.loader import load_model
from shared.sampling.params import SamplingParams
from shared.scheduling.chunk_wait import within_wait
from shared.scheduling.chunked import ChunkedScheduler
from shared.scheduling.chunks import Chunks, chunk_size, is_last
from shared.scheduling.schedule import Schedule
from shared.scheduling.step_costs import StepCosts, identity, save
from shared.text.tokenizer import Tokenizer
from tests.comparison import assert_equal
from tests.unit.scheduling_loop import Loop


def make_loop(tokenizer: Tokenizer, num_blocks: int = 100, **config: object) -> Loop:
    """Blocks of 4 tokens."""
    settings = EngineConfig(max_batch_size=8, **config)  # type: ignore[arg-type]
    pool = PagedKVCachePool(num_blocks, 4, 8, 128)
    return Loop(ChunkedScheduler(settings, pool, 128), tokenizer, lambda request, index: 1000 + index)


def add(loop: Loop, name: str, num_prompt_tokens: int, max_new_tokens: int = 30) -> Request:
    return loop.add_new(name, num_prompt_tokens, max_new_tokens, ignore_eos=True)


def written(schedule: Schedule) -> str:
    """``a+1 b:0-8`` if request a decodes and tokens 0 to 8 of b's prompt are computed; ``!`` where one samples."""
    parts = []
    for n, (request, start, num_tokens, _, num_logit_rows, _) in enumerate(schedule):
        what = "+1" if n < schedule.num_decoding else f":{start}-{start + num_tokens}"
        parts.append(request.request_id + what + "!" * num_logit_rows)
    return " ".join(parts)


def steps(loop: Loop, count: int) -> list[str]:
    return [written(loop.step()[0]) for _ in range(count)]


def named(value: list[int] | int | dict[str, int]) -> str:
    """A parameter of the sizes of chunks, as a table of results shows it."""
    if isinstance(value, int):
        return f"beside {value}"
    if isinstance(value, dict):
        return ", ".join(f"{name.removeprefix('max_')} {number}" for name, number in value.items()) or "no limit"
    return " ".join(map(str, value)) or "none"


@pytest.mark.parametrize(
    ("remaining", "num_decoding", "limits", "expected"),
    [
        ([10], 0, {}, [10]),
        ([10], 2, {"prefill_chunk_size": 4}, [4]),
        ([10, 3, 9], 0, {"prefill_chunk_size": 4}, [4, 3, 4]),
        ([10, 3, 9], 2, {"prefill_chunk_size": 8, "max_num_batched_tokens": 12}, [8, 2]),
        ([10, 3, 9], 2, {"prefill_chunk_size": 8, "max_num_batched_tokens": 10}, [8]),
        ([8224], 2, {}, [512]),
        ([8224, 8224], 2, {"chunk_beside_decoding": 100}, [100, 100]),
        ([8224], 0, {"chunk_beside_decoding": 100}, [4112]),
        ([8224], 0, {}, [4112]),
        ([6143], 0, {}, [6143]),
        ([600, 8000], 0, {}, [600, 3700]),
        ([512] * 16, 0, {}, [512] * 8),
        ([512] * 16, 1, {}, [512] * 15 + [511]),
        ([512] * 16, 0, {"prefill_chunk_size": 512}, [512] * 16),
        ([2500] * 3, 0, {}, [2500, 1250]),
        ([10] * 9 + [6000], 0, {}, [10] * 9 + [6000]),
        ([512] * 16, 0, {"max_num_batched_tokens": 1100}, [512, 512, 76]),
        ([1000] * 40, 0, {}, [1000] * 4 + [500]),
        ([6000, 9000], 0, {"max_prefill_chunks_per_step": 1}, [6000]),
        ([8224], 0, {"max_num_batched_tokens": 1000}, [914]),
        ([10, 3, 9], 0, {"prefill_chunk_size": 4, "max_prefill_chunks_per_step": 2}, [4, 3]),
        ([10, 3], 0, {"max_prefill_chunks_per_step": 1}, [10]),
        ([10, 3], 8, {"max_num_batched_tokens": 8}, [1]),
        ([10, 3], 8, {"max_num_batched_tokens": 3}, [1]),
        ([], 3, {}, []),
    ],
    ids=named,
)
def test_the_sizes_of_chunks(
    tokenizer: Tokenizer, remaining: list[int], num_decoding: int, limits: dict[str, int], expected: list[int]
) -> None:
    """The token budget, the step's and the chunk's size, the number of chunks; a prompt progresses whatever decodes."""
    found = Chunks(EngineConfig(**limits)).sizes(remaining, num_decoding)  # type: ignore[arg-type]
    assert_equal(found, expected, f"chunks of {remaining} tokens beside {num_decoding} decoding, {limits}", ("chunk",))


@pytest.mark.parametrize(
    ("wait", "expected", "milliseconds"),
    [(1, 64, 2), (2, 64, 2), (9, 256, 8), (10, 320, 10), (1000, 8192, 256), (10**400, 8192, 256)],
)
def test_a_wait_becomes_a_size_by_the_table_of_step_costs(
    tiny_checkpoints: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    wait: int,
    expected: int,
    milliseconds: int,
) -> None:
    """The largest step of 64, 128 … tokens that takes no longer: here 2 ms for 64 tokens, 2 ms more for each 64. The
    log says what was chosen, as a warning if even 64 take longer."""
    caplog.set_level("INFO", "infer.engine")
    monkeypatch.setenv("INFER_STEP_COSTS", str(tmp_path))
    model = load_model(tiny_checkpoints["llama"])
    save(StepCosts((1, 64, 1024), (0.002, 0.002, 0.032), source="measured", of=identity(model)))
    config = EngineConfig(max_batch_size=3, prefill_wait_ms=wait)
    assert within_wait(config, model) == EngineConfig(max_batch_size=3, chunk_beside_decoding=expected)
    [record] = [each for each in caplog.records if "prefill_wait_ms" in each.message]
    assert f"chunks of {expected} tokens, whose step takes {milliseconds} ms" in record.message
    assert record.levelname == ("WARNING" if milliseconds > wait else "INFO")
    assert within_wait(EngineConfig(), model) == EngineConfig()


def test_a_huge_budget_is_searched_at_once(
    tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Hundreds of millions of sizes, one after the other, would take minutes."""
    monkeypatch.setenv("INFER_STEP_COSTS", str(tmp_path))
    model, asked = load_model(tiny_checkpoints["llama"]), list[int]()
    save(StepCosts((1, 64, 1024), (0.002, 0.002, 0.032), source="measured", of=identity(model)))
    monkeypatch.setattr(StepCosts, "cost", lambda self, size: asked.append(size) or size / 1e9)
    config = EngineConfig(max_num_batched_tokens=10**10, prefill_wait_ms=9_000)
    assert within_wait(config, model).chunk_beside_decoding == 9 * 10**9 // 64 * 64
    assert len(asked) < 50


@pytest.mark.parametrize("number", [lesson.number for lesson in lessons() if lesson.number >= "07"])
def test_every_engine_with_chunks_heeds_the_wait(number: str, tiny_checkpoints: dict[str, Path]) -> None:
    folder = str(tiny_checkpoints["qwen3"])
    engine = find_lesson(number).engine(
        EngineConfig(model=folder, max_batch_size=2, max_seq_len=64, prefill_wait_ms=60_000)
    )
    assert chunk_size(engine.scheduler.config, 9000, 1) == 8192


def test_a_step_is_filled_in_order(tokenizer: Tokenizer) -> None:
    """Decoding requests first, then the oldest prompt; the rest of the budget goes to the next."""
    loop = make_loop(tokenizer, prefill_chunk_size=8, max_num_batched_tokens=12)
    add(loop, "a", 2)
    found = steps(loop, 1)
    add(loop, "b", 19)
    add(loop, "c", 6)
    found += steps(loop, 5)
    expected = ["a:0-2!", "a+1! b:0-8 c:0-3", "a+1! b:8-16 c:3-6!", "a+1! c+1! b:16-19!", "a+1! b+1! c+1!"]
    assert_equal(found[:5], expected, "what each step computes", ("step",))


def test_a_chunk_ends_where_no_more_may_be_computed(tokenizer: Tokenizer) -> None:
    """As before a compression: what a request may compute next is not all that it has left."""
    loop = make_loop(tokenizer)
    loop.scheduler.prefill = Chunks(loop.scheduler.config, lambda request: 7 if request.num_scheduled_tokens < 7 else 3)
    add(loop, "a", 10)
    assert_equal(steps(loop, 3), ["a:0-7", "a:7-10!", "a+1!"], "what each step computes", ("step",))


def test_only_the_last_chunk_samples(tokenizer: Tokenizer) -> None:
    loop = make_loop(tokenizer, prefill_chunk_size=4)
    a = add(loop, "a", 10)
    num_outputs = [len(loop.step()[1]) for _ in range(4)]
    assert_equal(num_outputs, [0, 0, 1, 1], "outputs of each step; a chunk before the last gives none", ("step",))
    assert_equal(a.num_computed_tokens, 11, "computed tokens")
    assert_equal(a.output_ids, [1000, 1001], "output", ("token",))


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("fcfs", ["a+1! b+1! c:0-8", "a+1! b+1! c:8-16", "a+1! b+1! c:16-20!", "a+1! b+1! c+1!"]),
        ("prefill_first", ["c:0-8", "a+1! b+1! c:8-16", "c:16-20!", "a+1! b+1! c+1!"]),
        ("decode_round_robin", ["a+1! c:0-8", "b+1! c:8-16", "a+1! c:16-20!", "a+1! b+1! c+1!"]),
    ],
)
def test_policies_say_which_requests_decode_beside_chunks(
    tokenizer: Tokenizer, policy: str, expected: list[str]
) -> None:
    loop = make_loop(tokenizer, prefill_chunk_size=8, scheduler_policy=policy, max_decode_interval=2)
    add(loop, "a", 2)
    add(loop, "b", 2)
    steps(loop, 2)
    add(loop, "c", 20)
    assert_equal(steps(loop, 4), expected, f"what each step computes under {policy}", ("step",))


def test_a_request_is_preempted_between_chunks_and_recomputed_in_chunks(tokenizer: Tokenizer) -> None:
    """Its blocks go to the older request; later it begins again, outputs included, and loses no token."""
    loop = make_loop(tokenizer, num_blocks=9, prefill_chunk_size=2, max_prefill_chunks_per_step=1)
    a = add(loop, "a", 8, max_new_tokens=16)
    steps(loop, 5)
    b = add(loop, "b", 20, max_new_tokens=4)
    found, preempted = steps(loop, 2), []
    assert_equal(found, ["a+1! b:0-2", "a+1! b:2-4"], "what each step computes", ("step",))
    while loop.has_work():
        before = b.num_computed_tokens
        schedule = loop.step()[0]
        found.append(written(schedule))
        preempted += [(*schedule.preempted, before)] if schedule.preempted else []
        assert len(found) < 60, f"the requests do not finish; the last step computes {found[-1]!r}"
    assert_equal(preempted, [("b", 14)], "what was preempted, and the tokens of b's prompt that were computed then")
    assert_equal(a.output_ids, [*range(1000, 1016)], "a's output", ("token",))
    assert_equal(b.output_ids, [*range(1000, 1004)], "b's output", ("token",))
    assert_equal(loop.scheduler.pool.audit(), [], "what the pool still holds")


def test_outputs_are_recomputed_in_chunks_too(tokenizer: Tokenizer) -> None:
    """A preempted request with outputs is computed again beyond the end of its prompt."""
    loop = make_loop(tokenizer, num_blocks=8, prefill_chunk_size=4)
    a, b = add(loop, "a", 6, max_new_tokens=20), add(loop, "b", 6, max_new_tokens=12)
    found: list[str] = []
    while loop.has_work():
        found.append(written(loop.step()[0]))
        assert len(found) < 60, f"the preempted request does not finish; the last step computes {found[-1]!r}"
    assert_equal(loop.scheduler.num_preemptions, 1, "preemptions")
    assert_equal(a.output_ids, [*range(1000, 1020)], "a's output", ("token",))
    assert_equal(b.output_ids, [*range(1000, 1012)], "b's output", ("token",))


def request_at(num_outputs: int, num_computed: int, num_scheduled: int) -> Request:
    """A request with a prompt of ten tokens."""
    request = Request("a", [5] * 10, SamplingParams(), 0)
    for token_id in range(num_outputs):
        request.append(token_id)
    request.num_computed_tokens, request.num_scheduled_tokens = num_computed, num_scheduled
    return request


@pytest.mark.parametrize(
    ("num_outputs", "num_computed", "num_scheduled", "num_tokens", "expected"),
    [
        pytest.param(0, 0, 0, 4, False, id="the first chunk"),
        pytest.param(0, 4, 4, 6, True, id="the rest of the prompt"),
        pytest.param(0, 0, 0, 10, True, id="the whole prompt"),
        pytest.param(0, 0, 4, 4, False, id="the second chunk, the first in flight"),
        pytest.param(0, 0, 4, 6, True, id="the rest of the prompt, the first chunk in flight"),
        pytest.param(3, 0, 0, 10, False, id="the prompt of a preempted request with 3 outputs"),
        pytest.param(3, 8, 8, 5, True, id="its rest"),
        pytest.param(3, 4, 8, 5, True, id="its rest, a chunk in flight"),
    ],
)
def test_the_last_chunk_leaves_no_token(
    num_outputs: int, num_computed: int, num_scheduled: int, num_tokens: int, expected: bool
) -> None:
    found = is_last(request_at(num_outputs, num_computed, num_scheduled), num_tokens)
    what = f"10 prompt tokens and {num_outputs} outputs, {num_computed} computed, {num_scheduled} scheduled"
    assert_equal(found, expected, f"{what}: whether the next {num_tokens} are the last")


def test_a_request_with_nothing_left_to_schedule_has_no_chunk() -> None:
    """As while the step is in flight that reaches its length: it is neither prefilling nor decoding."""
    prefilling, decoding, ending = request_at(0, 0, 4), request_at(1, 10, 10), request_at(1, 10, 11)
    found = Chunks(EngineConfig()).prompts([prefilling, decoding, ending])
    numbers = [[prefilling, decoding, ending].index(request) for request in found]
    assert_equal(numbers, [0], "prompts among one that prefills, one that decodes, one with all scheduled", ("prompt",))


def test_a_prompt_without_a_chunk_is_not_in_the_step(tokenizer: Tokenizer) -> None:
    loop = make_loop(tokenizer, prefill_chunk_size=4, max_prefill_chunks_per_step=1)
    add(loop, "a", 8)
    add(loop, "b", 3)
    assert_equal(steps(loop, 3), ["a:0-4", "a:4-8!", "a+1! b:0-3!"], "what each step computes", ("step",))

"""Phase 6 gives the same outputs from blocks as phase 5 from regions, with and without preemption."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

from phases.phase_03_1.engine import Engine as Single
from phases.phase_05.engine import Engine as Contiguous
from phases.phase_06.engine import Engine
from shared.engine.config import SCHEDULER_POLICIES, EngineConfig
from shared.engine.output import StepOutput
from shared.engine.record import StepRecord
from shared.engine.sampling.sampler import SamplerOutput
from shared.errors import ConfigError, RequestError
from shared.sampling.params import SamplingParams
from shared.server.app import make_app
from shared.server.engine.thread import EngineThread
from shared.server.settings import ServerConfig
from shared.text.stopping import FinishReason
from tests import mixed_requests
from tests.as_transformers import ASKED, assert_served
from tests.launches import launched
from tests.mixed_requests import EARLY as SHORT
from tests.mixed_requests import EARLY_ARRIVALS as SHORT_ARRIVALS
from tests.mixed_requests import GREEDY, SENTENCE, Requests, tokens
from tests.random_loads import assert_failures_stay_apart, break_off, serve_through
from tests.reference_tokens import ReferenceTokens

MAX_SEQ_LEN = 128
LONG: Requests = [("y", GREEDY | {"max_new_tokens": 70}), ("z", GREEDY | {"max_new_tokens": 70})]
MIXED, ARRIVALS = [*LONG, *SHORT], [0, 0, *SHORT_ARRIVALS]  # the long ones are preempted


def make(folder: Path, block_size: int = 16, tokens: int | None = None, **config: Any) -> Engine:
    """An engine whose pool holds ``tokens`` tokens, rounded up to blocks; None: as many as can be used."""
    config = {"max_seq_len": MAX_SEQ_LEN, "block_size": block_size} | config
    num_blocks = None if tokens is None else -(-tokens // block_size)
    return Engine(EngineConfig(model=str(folder), num_gpu_blocks=num_blocks, **config))


def serve(
    engine: Any, requests: Requests, arrivals: Sequence[int] | None = None
) -> tuple[list[list[StepOutput]], list[StepRecord]]:
    """See `tests.mixed_requests.serve`; records name each preemption."""
    before = engine.load().num_preemptions
    answers, records = mixed_requests.serve(engine, requests, arrivals)
    assert sum(len(record.preempted) for record in records) == engine.load().num_preemptions - before
    return answers, records


def seen(outputs: Sequence[StepOutput]) -> list[StepOutput]:
    """Everything that a client receives, except the request id and the log-probabilities."""
    return [output._replace(request_id="", logprobs=None) for output in outputs]


def logprobs(outputs: Sequence[StepOutput]) -> list[float]:
    return [p for o in outputs if o.logprobs for p in (o.logprobs.logprob, *(p for _, p in o.logprobs.top))]


def alone(folder: Path, requests: Sequence[tuple[str | list[int], dict[str, Any]]]) -> list[list[StepOutput]]:
    single = Single(EngineConfig(model=str(folder), max_seq_len=MAX_SEQ_LEN))
    return [list(single.generate(prompt, SamplingParams(**params))) for prompt, params in requests]


# The same tokens.


def test_each_answer_of_a_changing_batch_with_preemptions_is_that_of_phase_5(model_folder: Path) -> None:
    """The pools hold one sequence of 128 tokens, in blocks of several sizes; of one where there are no windows."""
    contiguous = Contiguous(EngineConfig(model=str(model_folder), max_seq_len=MAX_SEQ_LEN))
    expected, _ = serve(contiguous, MIXED, ARRIVALS)
    ways: list[tuple[int, dict[str, Any]]] = [
        (1, {"scheduler_policy": "fcfs"}),
        (3, {"scheduler_policy": "prefill_first", "max_decode_interval": 3}),
        (16, {"scheduler_policy": "decode_round_robin", "max_decode_interval": 3, "attention_backend": "naive"}),
    ]
    for block_size, config in {"tiny-llama": ways[:1], "tiny-qwen3": ways[1:2]}.get(model_folder.name, ways):
        engine = make(model_folder, block_size, 128, max_batch_size=5, max_num_batched_tokens=100, **config)
        answers, _ = serve(engine, MIXED, ARRIVALS)
        for (prompt, params), ours, theirs in zip(MIXED, answers, expected, strict=True):
            assert seen(ours) == seen(theirs), (config, prompt, params)
            assert logprobs(ours) == pytest.approx(logprobs(theirs), abs=1e-4)
        assert engine.load().num_preemptions > 0, config


@pytest.mark.parametrize("config", [{}, {"batching_mode": "static"}])
def test_without_preemption_each_answer_is_as_if_alone(
    tiny_checkpoints: dict[str, Path], config: dict[str, str]
) -> None:
    folder = tiny_checkpoints["qwen3"]
    engine = make(folder, max_batch_size=3, **config)
    answers, _ = serve(engine, SHORT, SHORT_ARRIVALS)
    assert [seen(answer) for answer in answers] == [seen(answer) for answer in alone(folder, SHORT)]
    assert engine.load().num_preemptions == 0


def test_greedy_tokens_equal_those_of_transformers(model_folder: Path, reference_tokens: ReferenceTokens) -> None:
    engine = make(model_folder, block_size=2, tokens=112, max_seq_len=112)
    records = assert_served(engine, reference_tokens, ASKED, [0, 2, 5])
    assert any(record.preempted for record in records)


@pytest.mark.demo
def test_the_demo_model_answers_as_transformers_does(demo_folder: Path, reference_tokens: ReferenceTokens) -> None:
    engine = make(demo_folder, block_size=2, tokens=16, max_seq_len=16)
    asked = [(prompt, 6) for prompt in ("The capital of France is", "Once upon a time", "2 + 2 =")]
    assert_served(engine, reference_tokens, asked, [0, 1, 2])
    assert engine.load().num_preemptions > 0


@pytest.mark.parametrize(
    "config", [*({"scheduler_policy": p} for p in SCHEDULER_POLICIES), {"batching_mode": "static"}]
)
def test_with_regions_outputs_and_steps_are_those_of_phase_5(
    tiny_checkpoints: dict[str, Path], config: dict[str, str]
) -> None:
    options: dict[str, Any] = {"max_seq_len": MAX_SEQ_LEN, "max_batch_size": 4, "max_num_batched_tokens": 100, **config}
    options |= {"model": str(tiny_checkpoints["qwen3"]), "kv_cache_backend": "contiguous"}
    ours, theirs = (serve(engine(EngineConfig(**options)), SHORT, SHORT_ARRIVALS) for engine in (Engine, Contiguous))
    assert ours == theirs


def test_generate_answers_beside_requests_that_run(folder: Path) -> None:
    """The second request preempts the first, and then releases its blocks."""
    long: list[tuple[list[int], dict[str, Any]]] = [([7] * 40, GREEDY | {"max_new_tokens": 60}), ([9] * 60, GREEDY)]
    expected = [tokens(answer) for answer in alone(folder, long)]
    engine = make(folder, tokens=128)
    first, second = (engine.generate(prompt, SamplingParams(**params)) for prompt, params in long)
    got = [next(first)]
    assert tokens(list(second)) == expected[1]
    assert tokens(got + list(first)) == expected[0]
    assert engine.load().num_preemptions > 0
    assert engine.pool.audit() == []


# Preemption.


def test_what_a_request_asks_for_survives_preemption(tiny_checkpoints: dict[str, Path]) -> None:
    """Each kind of request is preempted, late in its output, by an older, longer one."""
    folder = str(tiny_checkpoints["qwen3"])
    engine = make(tiny_checkpoints["qwen3"], block_size=4, tokens=128)
    contiguous = Contiguous(EngineConfig(model=folder, max_seq_len=MAX_SEQ_LEN))
    first = ("x", GREEDY | {"max_new_tokens": 60})

    def both(**params: Any) -> tuple[list[StepOutput], list[StepOutput]]:
        """The request's outputs with and without a preemption."""
        requests = [first, (SENTENCE, {"max_new_tokens": 40, "ignore_eos": True} | params)]
        (_, ours), records = serve(engine, requests)
        name = ours[0].request_id
        assert [record.preempted for record in records if record.preempted] == [(name,)]
        (_, prompt), (_, recomputed) = (p for record in records for p in record.prefilled if p[0] == name)
        assert recomputed > prompt + 20
        return ours, serve(contiguous, requests)[0][1]

    for params in (
        {"seed": 2, "top_k": 20, "top_p": 0.9},
        {"seed": 3, "temperature": 1.3, "repetition_penalty": 1.5, "frequency_penalty": 1.0, "presence_penalty": 0.5},
        {"seed": 4, "logprobs": 4},
    ):
        ours, theirs = both(**params)
        assert seen(ours) == seen(theirs), params
        assert len(ours) == 40
        assert logprobs(ours) == pytest.approx(logprobs(theirs), abs=1e-4)
    assert [len(o.logprobs.top) >= 4 for o in ours if o.logprobs] == [True] * 40
    stop = "".join(output.text for output in ours)[-6:-2]
    ours, theirs = both(seed=4, stop=(stop,))
    assert seen(ours) == seen(theirs)
    assert (ours[-1].finish_reason, ours[-1].stop) == (FinishReason.STOP, stop)


@pytest.mark.parametrize("policy", SCHEDULER_POLICIES)
def test_nothing_fails_nothing_deadlocks_and_the_oldest_always_ends(folder: Path, policy: str) -> None:
    """Each of six requests could fill the pool alone, and all of them start."""
    requests = [([7 + n] * (1 + n), GREEDY | {"max_new_tokens": 23 - n}) for n in range(6)]
    expected = [tokens(answer) for answer in alone(folder, requests)]
    engine = make(folder, 2, 24, max_seq_len=24, max_batch_size=6, scheduler_policy=policy, max_decode_interval=2)
    answers, records = serve(engine, requests)
    assert [tokens(answer) for answer in answers] == expected
    assert all(answer[-1].finish_reason is FinishReason.LENGTH for answer in answers)
    assert engine.load().num_preemptions >= 6
    ended: set[str] = set()
    for record in records:
        oldest = next(name for name in map(str, range(6)) if name not in ended)
        assert oldest not in record.preempted
        prefilled = {name for name, _ in record.prefilled}
        assert not (prefilled & set(record.preempted)), "no request is readmitted in the step that preempted it"
        assert not record.failed
        ended |= set(record.finished)
    recomputed = engine.runner.num_tokens_computed - sum(
        len(prompt) + len(a) - 1 for (prompt, _), a in zip(requests, answers, strict=True)
    )
    assert recomputed == computed_twice(records, requests)


def computed_twice(records: Sequence[StepRecord], requests: Sequence[tuple[list[int], dict[str, Any]]]) -> int:
    """Computed tokens lost to preemption, from the records alone: those that preempted requests had in the cache."""
    computed = dict.fromkeys(map(str, range(len(requests))), 0)
    lost = 0
    for record in records:
        for name in record.preempted:
            lost += computed[name]
            computed[name] = 0
        for name, num_tokens in record.prefilled:
            assert computed[name] == 0
            computed[name] = num_tokens
        for name in record.decoded:
            computed[name] += 1
    return lost


@pytest.mark.failing_forwards
def test_requests_that_fail_and_are_aborted_leave_no_block_behind(tiny_checkpoints: dict[str, Path]) -> None:
    folder = tiny_checkpoints["qwen3"]
    engine = make(folder, block_size=3, tokens=60, max_seq_len=48, max_batch_size=6, max_num_batched_tokens=60)
    step = engine.step

    def audited() -> list[StepOutput]:
        outputs = step()
        assert engine.pool.audit_blocks() == []
        return outputs

    engine.step = audited
    assert_failures_stay_apart(engine, lambda requests: [tokens(answer) for answer in alone(folder, requests)])
    assert engine.pool.free_tokens == engine.pool.capacity_tokens
    assert engine.load().num_preemptions >= 3


@pytest.mark.parametrize("place", ["forward", "wait", "commit"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, NotImplementedError])
def test_a_step_that_is_broken_off_loses_no_output(
    folder: Path, error: type[BaseException], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the step preempted requests, or had prompts, whose forward is repeated."""
    requests = [([7 + n] * 4, GREEDY | {"max_new_tokens": 1 if n == 2 else 12}) for n in range(5)]
    expected = [tokens(answer) for answer in alone(folder, requests)]
    engine = make(folder, block_size=2, tokens=24, max_seq_len=16)
    places = {"forward": (engine, "decode"), "wait": (SamplerOutput, "wait"), "commit": (engine.pool, "commit")}
    owner, name = places[place]
    break_off(owner, name, error, lambda number: number % (2 if place == "forward" else 3) == 0, monkeypatch)
    audit = engine.pool.audit
    engine.pool.audit = lambda: engine.pool.audit_blocks() + audit()
    answers, _, num_preempting = serve_through(engine, requests, error)
    assert num_preempting > 0, "no interrupted step preempted a request"
    assert answers == expected


# Refused settings and requests.


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"num_gpu_blocks": 7, "max_seq_len": 128},
            r"num_gpu_blocks is 7: 112 tokens in blocks of 16. One sequence may have max_seq_len = 128 tokens, which "
            "is 8 blocks",
        ),
        ({"num_gpu_blocks": 10**12}, r"1000000000000 blocks of 16 tokens take [\d,.]+ GB and cpu has [\d,.]+ GB free"),
    ],
)
def test_settings_that_cannot_be(folder: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine(EngineConfig(model=str(folder), **given))


def test_what_an_empty_pool_cannot_hold_is_refused_on_arrival(folder: Path) -> None:
    """By the engine, and over HTTP with 422; a refused request leaves no state."""
    engine = make(folder, tokens=32, max_seq_len=32)
    assert engine.pool.request_capacity == 32, "an engine's pool holds the longest sequence that it takes"
    with pytest.raises(RequestError, match=r"length is 32 tokens. However, you requested 32 tokens"):
        engine.add_request([7] * 32, SamplingParams(max_new_tokens=1))
    engine.pool.request_capacity = 20  # as in a smaller pool
    with pytest.raises(RequestError, match=r"length is 20 tokens. However, you requested 21 tokens \(10 in the prompt"):
        engine.add_request([7] * 10, SamplingParams(max_new_tokens=11))
    assert not engine.has_work()
    with TestClient(make_app(EngineThread(engine), ServerConfig(model_name="tiny"))) as client:
        for length, answer, status in ((10, 11, 422), (40, 1, 422), (10, 10, 200)):
            body = {"model": "tiny", "prompt": [7] * length, "max_tokens": answer, "ignore_eos": True}
            response = client.post("/v1/completions", json=body)
            assert response.status_code == status, response.text
            if length == 10 and status == 422:
                assert "the KV cache holds 20 for one request" in response.json()["error"]["message"]
    assert engine.pool.audit() == []


def test_without_a_number_of_blocks_the_pool_sizes_itself(folder: Path) -> None:
    engine = make(folder, max_seq_len=100, max_batch_size=3)
    assert engine.pool.capacity_tokens == 3 * 7 * 16, "no more than three sequences can fill"
    assert engine.stats()["cache capacity (tokens)"] == 3 * 7 * 16
    assert engine.stats()["cache bytes"] == engine.view.keys.nbytes + engine.view.values.nbytes


def test_packed_weights_go_with_blocks(folder: Path) -> None:
    options: dict[str, Any] = {"dtype": "bfloat16", "pack_weights": True, "max_batch_size": 3}
    both = [make(folder, **options), make(folder, tokens=128, **options)]
    many, few = (serve(engine, MIXED[:3])[0] for engine in both)
    assert [len(answer) for answer in many] == [len(answer) for answer in few]


# Per-step work shared by all layers.


def test_a_step_s_index_tensors_are_made_once_for_all_layers(tiny_checkpoints: dict[str, Path]) -> None:
    """Each forward uploads its arrays once; on a CPU blocks are listed once for each distinct window of the model."""
    engine = make(tiny_checkpoints["gemma3_text"])
    windows = set(engine.model.config.windows)
    sends, cuts = counted_sends(engine), counted(engine.view.attention, "_cut")
    answers, _ = serve(engine, MIXED[3:6])
    assert len(answers) == 3
    assert sends == [1] * engine.runner.num_forwards
    assert len(cuts) == len(windows) * engine.runner.num_forwards
    assert len(windows) < engine.model.config.num_layers


def counted_sends(engine: Engine) -> list[int]:
    """A list that gets an entry for each upload, through either staging."""
    sends: list[int] = []
    for staging in engine.view.staging.values():
        counted(staging, "send", sends)
    return sends


def counted(owner: Any, name: str, calls: list[int] | None = None) -> list[int]:
    """A list that gets an entry for each future call of the method."""
    calls = [] if calls is None else calls
    method = getattr(owner, name)

    def counting(*args: Any) -> Any:
        calls.append(1)
        return method(*args)

    setattr(owner, name, counting)
    return calls


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize(("policy", "block_size"), list(zip(SCHEDULER_POLICIES, (1, 3, 16), strict=True)))
def test_tokens_on_the_gpu_equal_those_of_the_cpu(model_folder: Path, policy: str, block_size: int) -> None:
    options: dict[str, Any] = {"scheduler_policy": policy, "max_batch_size": 5, "max_num_batched_tokens": 100}
    engines = [
        make(model_folder, block_size, 128, device=device, dtype="float32", **options) for device in ("cpu", "cuda")
    ]
    on_cpu, on_gpu = (serve(engine, MIXED, ARRIVALS) for engine in engines)
    assert [tokens(answer) for answer in on_gpu[0]] == [tokens(answer) for answer in on_cpu[0]]
    assert on_gpu[1] == on_cpu[1], "the same steps"
    assert engines[1].load().num_preemptions > 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_paged_kernels_run_once_for_each_layer(model_folder: Path, dtype: str) -> None:
    engine = make(model_folder, device="cuda", dtype=dtype)
    layers = engine.model.config.num_layers
    for n in range(7):
        engine.add_request([7] * (20 + n), SamplingParams(**GREEDY, max_new_tokens=8))
    sends = counted_sends(engine)
    made = launched(engine)
    names = ("paged_prefill_kernel", "paged_attention_kernel", "kv_write_kernel")
    assert [made[name] for name in names] == [layers, 0, layers]
    assert len(sends) == 1
    made = launched(engine)
    assert [made[name] for name in names] == [0, layers, layers]
    assert len(sends) == 2
    engine.add_request([7] * 33, SamplingParams(**GREEDY, max_new_tokens=8))
    made = launched(engine)
    assert [made[name] for name in names] == [layers, layers, 2 * layers], "written for the prompt, and for the seven"
    assert made["decode_attention_kernel"] == 0
    assert len(sends) == 4


@pytest.mark.gpu
def test_the_pool_takes_what_the_gpu_has_left(folder: Path) -> None:
    options: dict[str, Any] = {"device": "cuda", "max_seq_len": 1024}
    engine = make(folder, **options)
    assert engine.pool.capacity_tokens == 16 * 1024, "what sixteen sequences can fill"
    free, _ = torch.cuda.mem_get_info()
    of_a_token = engine.view.num_bytes // engine.pool.capacity_tokens
    with pytest.raises(ConfigError, match=r"blocks of 16 tokens take [\d,.]+ GB and cuda(:0)? has [\d,.]+ GB free"):
        make(folder, tokens=2 * math.ceil(free / of_a_token), **options)

"""Phase 12.1 gives the tokens of phase 12 for any number of ranks, and a rank that fails ends the group."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import shared.loading.weights
import shared.tracks.ranks.collectives
import shared.tracks.ranks.watch
from phases.phase_12.engine import Engine as Whole
from phases.phase_12_1.engine import Engine
from shared.engine.config import EngineConfig
from shared.errors import ConfigError, RankError
from shared.grammar.grammar import Grammar
from shared.sampling.params import SamplingParams
from shared.tracing.lanes import activity_lanes
from shared.tracing.recorder import Recorder
from shared.tracing.timeline_page import trace_data
from shared.tracks.ranks.model_shard import ShardCheckpoint
from tests.mixed_requests import (
    ALIKE,
    ARRIVALS,
    ARRIVE,
    GREEDY,
    LONG,
    MIXED,
    SMALL,
    STEM,
    Requests,
    seen,
    serve,
    tokens,
)
from tests.ranks import FAMILIES, LosingConfig, Poison, checkpoint_for_ranks
from tests.waiting import wait_until

NGRAM: dict[str, Any] = {"use_speculative_decoding": True, "drafter": "ngram", "adapt_spec_length": False}
DRAFTING: dict[str, Any] = {"use_speculative_decoding": True, "draft_model": "x"}
GRAMMAR: Requests = [
    (STEM[:9], {"temperature": 0.0, "max_new_tokens": 40, "structured_output": Grammar.regex(r"\[\d(, \d){2,9}\]")}),
    ("x", {"seed": 3, "max_new_tokens": 40, "structured_output": Grammar.choice(["red", "green", "greenish"])}),
]
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"tensor_parallel_size": 2, "prefill_chunk_size": 16, "overlap_scheduling": True},
    "qwen3": {"tensor_parallel_size": 2, **NGRAM},
    "gemma3": {"tensor_parallel_size": 4, "prefill_chunk_size": 16},
}
"""Each family's group: chunks and overlap, drafts, and KV heads that two ranks share."""
LLAMA = pytest.mark.parametrize("engines", ["llama"], indirect=True)


def make(folder: Path, phase: Any = Engine, **config: Any) -> Any:
    return phase(EngineConfig(model=str(folder), **{"max_batch_size": 4} | config))


def alone(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != "tensor_parallel_size"}


@pytest.fixture(scope="module", params=["llama", "qwen3", pytest.param("gemma3", marks=pytest.mark.slow)])
def engines(request: pytest.FixtureRequest, session_folder: Path) -> Iterator[tuple[Engine, Whole]]:
    """A group, and the engine of phase 12 with the same settings; most preempt and cache prefixes."""
    folder, config = checkpoint_for_ranks(request.param, session_folder), SMALL | KINDS[request.param]
    group = make(folder, **config)
    yield group, make(folder, Whole, **alone(config))
    group.group.close()


def test_answers_are_those_of_one_process(engines: tuple[Engine, Whole]) -> None:
    """With chunks, prefixes, preemptions, drafts and grammars; greedy and sampled. Four ranks get fewer requests."""
    group, whole = engines
    loads = [(MIXED, ARRIVALS), (ALIKE, ARRIVE), (GRAMMAR, [0, 1])]
    for requests, arrivals in loads[group.config.tensor_parallel_size // 4 :]:
        answers, records = serve(group, requests, arrivals)
        expected, steps = serve(whole, requests, arrivals)
        assert seen(answers) == seen(expected)
        assert records == steps, "rank 0 plans what one process plans"
    assert group.load().num_preemptions > 0
    assert group.stats()["prefix cache hits (tokens)"] > 0
    drafts = group.stats()["drafts accepted (tokens)"] + group.stats()["drafts rejected (tokens)"]
    assert (drafts > 0) is group.config.use_speculative_decoding


@LLAMA
def test_log_probabilities_are_those_of_all_logits(engines: tuple[Engine, Whole]) -> None:
    params = GREEDY | {"max_new_tokens": 3, "logprobs": 2, "prompt_logprobs": 1}
    (found,), (expected,) = (serve(engine, [(STEM[:20], params)])[0] for engine in engines)
    assert tokens(found) == tokens(expected)
    of_prompts = [[each.logprob for each in answer[0].prompt_logprobs if each] for answer in (found, expected)]
    assert of_prompts[0] == pytest.approx(of_prompts[1], abs=1e-4)
    assert len(of_prompts[0]) > 1
    for one, other in zip(found, expected, strict=True):
        assert [i for i, _ in one.logprobs.top] == [i for i, _ in other.logprobs.top]
        assert one.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-4)


@LLAMA
def test_only_greedy_steps_gather_no_logits(engines: tuple[Engine, Whole], monkeypatch: pytest.MonkeyPatch) -> None:
    group, _ = engines
    gathered: list[int] = []
    gather = group.runner.ranks.vocabulary.gather
    monkeypatch.setattr(
        group.runner.ranks.vocabulary, "gather", lambda logits: gathered.append(len(logits)) or gather(logits)
    )
    params = GREEDY | {"max_new_tokens": 4}
    serve(group, [("x", params), (STEM, params)])
    assert gathered == []
    for more in ({"logit_bias": {5: 2.0}}, {"repetition_penalty": 1.2}, {"temperature": 1.0}, {"logprobs": 1}):
        serve(group, [("x", params | more), (STEM, params)])
        assert gathered, more
        gathered.clear()


@LLAMA
def test_a_trace_has_a_lane_for_each_other_rank(engines: tuple[Engine, Whole]) -> None:
    group, whole = engines
    params = SamplingParams(**GREEDY, max_new_tokens=5)
    for engine in (group, whole):
        recorder = Recorder(engine)
        recorder.add_request("x", params)
        while engine.has_work():
            recorder.step()
        num_others = group.config.tensor_parallel_size - 1 if engine is group else 0
        steps = recorder.trace("ranks").steps
        num_notes = num_others * sum(any(span.name == "launch" for span in step.host) for step in steps)

        def has_all_notes(recorder: Recorder = recorder, num_notes: int = num_notes) -> bool:
            steps = recorder.trace("ranks").steps
            return sum(len(notes) for step in steps for notes in step.ranks) >= num_notes

        wait_until(has_all_notes, 30.0)  # another rank's last report may arrive after the last token
        trace = recorder.trace("ranks")
        lanes = dict(activity_lanes(trace))
        assert list(lanes) == ["host", *(f"rank {n + 1}" for n in range(num_others))]
        for n in range(num_others):
            spans = lanes[f"rank {n + 1}"]
            for step, of_step in zip(trace.steps, spans, strict=True):
                assert len(of_step) == any(span.name == "launch" for span in step.host)
                assert all(step.started_ns <= span.started_ns < span.ended_ns for span in of_step)
            assert f"rank {n + 1}" in trace_data(trace)["steps"][0]


def test_a_rank_has_its_share(engines: tuple[Engine, Whole]) -> None:
    group, whole = engines
    size = group.config.tensor_parallel_size
    weights = [sum(p.nbytes for p in engine.model.parameters()) for engine in engines]
    assert weights[0] < 1.2 * weights[1] / min(size, 2), "of Gemma, two ranks each share the keys and values"
    num_kv_heads = whole.model.config.num_kv_heads
    assert group.view.num_bytes * num_kv_heads == whole.view.num_bytes * max(1, num_kv_heads // size)
    assert group.pool.capacity_tokens == whole.pool.capacity_tokens


def test_an_engine_of_one_rank_is_that_of_phase_12(session_folder: Path) -> None:
    folder = checkpoint_for_ranks("llama", session_folder)
    engine = make(folder, **SMALL)
    assert engine.group.watch is None
    assert seen(serve(engine, MIXED, ARRIVALS)[0]) == seen(serve(make(folder, Whole, **SMALL), MIXED, ARRIVALS)[0])


@pytest.mark.parametrize(
    ("size", "draft_ranks", "on_each", "acceptance"),
    [
        (2, 1, False, "coupled"),
        (2, 1, True, "coupled"),
        (2, 2, False, "rejection"),
        (4, 2, False, "coupled"),
    ],
)
def test_a_draft_model_is_whole_or_cut_among_ranks(
    session_folder: Path, size: int, draft_ranks: int, on_each: bool, acceptance: str
) -> None:
    """Two ranks with quantized weights of the model, which are sharded too."""
    folder = checkpoint_for_ranks("llama", session_folder)
    config = SMALL | {
        "quantization": "fp8" if size == 2 else None,
        "use_speculative_decoding": True,
        "draft_model": str(folder),
    }
    config |= {"adapt_spec_length": False, "spec_length": 3, "num_gpu_blocks": 200, "acceptance_method": acceptance}
    group = make(folder, tensor_parallel_size=size, draft_ranks=draft_ranks, draft_on_each_rank=on_each, **config)
    alone = make(folder, Whole, **config)
    answers, expected = (serve(engine, MIXED, ARRIVALS)[0] for engine in (group, alone))
    assert [tokens(answer) for answer in answers] == [tokens(answer) for answer in expected]
    accepted, expected_accepted = (engine.stats()["drafts accepted (tokens)"] for engine in (group, alone))
    assert accepted == expected_accepted > 0
    assert (group.stats()["drafts rejected (tokens)"] > 0) is (size == 2)
    num_sent, is_drafter_heard = group.group.sender.number, on_each or draft_ranks > 1
    assert num_sent == group.runner.num_forwards + is_drafter_heard * group.drafter.drafter.runner.num_forwards
    drafter = group.drafter.drafter
    whole, part = make(folder, Whole).model, drafter.model
    assert (sum(p.nbytes for p in part.parameters()) < 0.6 * sum(p.nbytes for p in whole.parameters())) is (
        draft_ranks > 1
    )
    group.group.close()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"tensor_parallel_size": 3}, "is 3 and the model has 8 query heads and 4 KV heads; .* Choose 1 or 2 or 4"),
        ({"tensor_parallel_size": 2, "pack_weights": True}, "packed matrices are whole: leave one of them out"),
        (
            {"tensor_parallel_size": 2, "draft_ranks": 2},
            "draft_ranks is 2, draft_model is None and tensor_parallel_size",
        ),
        (
            DRAFTING | {"tensor_parallel_size": 2, "draft_ranks": 2, "draft_on_each_rank": True},
            "draft_on_each_rank is True, draft_model is 'x' and draft_ranks is 2; .* leave draft_ranks out",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused(session_folder: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(checkpoint_for_ranks("llama", session_folder), **config)


@LLAMA
def test_an_interrupt_waits_for_the_end_of_a_step(
    engines: tuple[Engine, Whole], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks have started it, and the engine continues afterwards."""
    group, whole = engines
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background process starts out ignoring it
    requests = [(STEM, GREEDY | {"max_new_tokens": 12}), ("x", GREEDY | {"max_new_tokens": 9})]
    expected = [tokens(answer) for answer in serve(whole, requests)[0]]
    names = [group.add_request(prompt, SamplingParams(**params)) for prompt, params in requests]
    found: dict[str, list[int | None]] = {name: [] for name in names}
    send, num_interrupts = group.group.sender.send, 0

    def interrupted(batch: Any) -> None:
        send(batch)
        signal.raise_signal(signal.SIGINT)

    for number in range(100):
        monkeypatch.setattr(group.group.sender, "send", interrupted if number % 3 == 1 else send)
        try:
            for output in group.step():
                found[output.request_id].append(output.token_id)
        except KeyboardInterrupt:
            num_interrupts += 1
        if not group.has_work():
            break
    assert num_interrupts > 1
    assert list(found.values()) == expected


# A rank that dies, hangs, or runs out of memory.


def drain(engine: Engine) -> None:
    while engine.has_work():
        engine.step()


def kill(engine: Engine) -> None:
    engine.group.watch.processes[0].kill()


FAILURES = {
    "kill": (kill, "was ended by SIGKILL; the other ranks cannot go on without it and have ended"),
    "stop": (lambda engine: engine.group.watch.processes[0].send_signal(signal.SIGSTOP), "made no progress for 2 s;"),
    "run_out": (
        lambda engine: engine.group.sender.send((0, Poison())),
        r"ran out of memory \(12 GB are too many\); the other",
    ),
}
"""What is done to rank 1, and what is said of it."""


@pytest.mark.parametrize("failure", FAILURES)
def test_a_rank_that_fails_ends_the_group_and_is_named(
    session_folder: Path, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    fail, sentence = FAILURES[failure]
    engine = make(checkpoint_for_ranks("llama", session_folder), tensor_parallel_size=2, **SMALL)
    engine.add_request("x", SamplingParams(**GREEDY, max_new_tokens=90))
    for ignored in (signal.SIGINT, signal.SIGTERM):  # a terminal or a supervisor sends them to each process
        engine.group.watch.processes[0].send_signal(ignored)
    engine.step()
    if failure == "stop":
        monkeypatch.setattr(shared.tracks.ranks.watch, "PATIENCE", 2.0)
    fail(engine)
    for go_on in (lambda: drain(engine), engine.step):
        with pytest.raises(RankError, match=f"Rank 1 of 2 {sentence}"):
            go_on()
    assert all(process.wait(60) for process in engine.group.watch.processes)


@pytest.mark.parametrize(
    ("where", "lose", "sentence"),
    [
        ("all_reduce_backend", partial(time.sleep, 1000), "Rank 1 of 2 made no progress for 2 s;"),
        ("quantization", partial(signal.raise_signal, signal.SIGKILL), "Rank 1 of 2 was ended by SIGKILL; the other"),
    ],
    ids=["hangs as it meets rank 0", "dies while it loads"],
)
def test_a_rank_that_is_lost_at_the_start_is_named(
    session_folder: Path, monkeypatch: pytest.MonkeyPatch, where: str, lose: Any, sentence: str
) -> None:
    """Rank 0 reads its third tensor only once the loss has been found, and then reads no more."""
    if "2 s" in sentence:
        monkeypatch.setattr(shared.tracks.ranks.collectives, "MEETING", timedelta(seconds=3))
    monkeypatch.setattr(shared.loading.weights, "WORKERS", 1)
    read, num_read = ShardCheckpoint.tensor, 0

    def is_lost(checkpoint: ShardCheckpoint) -> bool:
        try:
            checkpoint.check()
        except RankError:
            return True
        return False

    def waiting(self: ShardCheckpoint, name: str) -> torch.Tensor:
        nonlocal num_read
        while num_read == 2 and not is_lost(self):
            time.sleep(0.01)
        tensor = read(self, name)
        num_read += 1
        return tensor

    monkeypatch.setattr(ShardCheckpoint, "tensor", waiting)
    folder = checkpoint_for_ranks("llama", session_folder)
    config = LosingConfig(model=str(folder), tensor_parallel_size=2, max_seq_len=64).losing(where, lose)
    with pytest.raises(RankError, match=sentence):
        Engine(config)
    assert num_read == (2 if where == "quantization" else 0)


SCRIPT = """
import sys
from phases.phase_12_1.engine import Engine
from shared.engine.config import EngineConfig
engine = Engine(EngineConfig(model=sys.argv[1], tensor_parallel_size=2, max_seq_len=64))
print(engine.group.watch.processes[0].pid, flush=True)
sys.stdin.read()
"""


def test_no_rank_outlives_rank_0(session_folder: Path) -> None:
    """The script has no main guard, which multiprocessing would need."""
    folder = checkpoint_for_ranks("llama", session_folder)
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ
    ) as process:
        assert process.stdout is not None
        other = psutil.Process(int(process.stdout.readline()))
        process.kill()
        other.wait(60)


# On GPUs: on machines with 2 and 4 of them.


@pytest.mark.gpu
@pytest.mark.several_gpus
@pytest.mark.parametrize("sums", ["nccl", "peer"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_on_gpus_are_those_of_one(session_folder: Path, family: str, size: int, sums: str) -> None:
    """With graphs, whose replays are counted, and without."""
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs, and this machine has {torch.cuda.device_count()}")
    folder = checkpoint_for_ranks(family, session_folder)
    config: dict[str, Any] = {"device": "cuda", "dtype": "float32", "max_seq_len": 640, "num_gpu_blocks": 400}
    arrivals = [0, *ARRIVALS, 10]
    expected = [tokens(answer) for answer in serve(make(folder, Whole, **config), LONG, arrivals)[0]]
    for graphs in (True, False):
        options = config | {"tensor_parallel_size": size, "use_cuda_graphs": graphs, "all_reduce_backend": sums}
        group = make(folder, **options)
        assert (group.group.ranks.peers is not None) is (sums == "peer")
        assert [tokens(answer) for answer in serve(group, LONG, arrivals)[0]] == expected
        assert (group.stats()["CUDA graph replays"] > 0) is graphs
        group.group.close()


@pytest.mark.gpu
@pytest.mark.several_gpus
def test_a_gpu_that_is_lost_ends_the_group(session_folder: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    engine = make(checkpoint_for_ranks("llama", session_folder), device="cuda", tensor_parallel_size=2, max_seq_len=256)
    engine.add_request("x", SamplingParams(**GREEDY, max_new_tokens=200))
    for _ in range(3):
        engine.step()
    kill(engine)
    with pytest.raises(RankError, match="Rank 1 of 2 was ended by SIGKILL"):
        drain(engine)

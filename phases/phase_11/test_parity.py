"""Phase 11 gives the tokens of phase 10, whatever is proposed."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phases.phase_10.engine import Engine as Plain
from phases.phase_11.engine import Engine
from shared.engine.config import EngineConfig
from shared.scheduling import speculative
from shared.scheduling.schedule import Schedule
from shared.speculation.adaptive import a_tenth
from shared.text.stopping import FinishReason
from tests.drafts import Foresight, assert_greedy_same_and_others_repeatable, assert_no_trace, check_commits
from tests.mixed_requests import ALIKE, ARRIVALS, ARRIVE, MIXED, PENALISED, SMALL, Requests, seen, serve
from tests.random_loads import Load, answers_alone, assert_as_alone, interrupt, loads, sizes

NGRAM: dict[str, Any] = {"use_speculative_decoding": True, "drafter": "ngram", "adapt_spec_length": False}


class Speculative(Engine):
    """Checks what each step leaves behind."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        check_commits(self)

    @property
    def num_accepted(self) -> int:
        return self.stats()["drafts accepted (tokens)"]

    @property
    def num_rejected(self) -> int:
        return self.stats()["drafts rejected (tokens)"]


def make(folder: Path, phase: Any = Speculative, answers: Any = None, error_rate: float = 0.5, **config: Any) -> Any:
    engine = phase(EngineConfig(model=str(folder), **(NGRAM if phase is not Plain else {}) | config))
    if answers is not None:
        engine.drafter = Foresight([[o.token_id for o in answer] for answer in answers], error_rate)
    return engine


def has_guessed(engine: Speculative) -> bool:
    return engine.num_accepted > 0 and engine.num_rejected > 0


@pytest.mark.parametrize(
    ("family", "sizes", "overlaps"),
    [("llama", (1, 129), False), ("qwen3", (16, 9), False), ("gemma3_text", (3, 43), True)],
)
def test_outputs_are_those_of_phase_9(
    tiny_checkpoints: dict[str, Path], family: str, sizes: tuple[int, int], overlaps: bool
) -> None:
    """Greedy and sampled, with penalties, chunks, shared prefixes and preemptions; found by lookup, and predicted."""
    options = SMALL | {"prefill_chunk_size": 30} | dict(zip(("block_size", "num_gpu_blocks"), sizes, strict=True))
    requests, arrivals = [*ALIKE, *MIXED], [*ARRIVE, *ARRIVALS]
    folder = tiny_checkpoints[family]
    answers = serve(plain := make(folder, Plain, **options), requests, arrivals)[0]
    for foreseen, arrive in ((None, arrivals), (answers, [0] * len(requests))):
        engine = make(folder, answers=foreseen, overlap_scheduling=overlaps, **options)
        assert seen(serve(engine, requests, arrive)[0]) == seen(answers)
        assert has_guessed(engine)
        assert engine.scheduler.num_prefix_hits > 0
        assert engine.load().num_preemptions > 0 or sizes[0] == 16
        assert engine.load().kv_usage == 0
    assert engine.runner.num_forwards < plain.runner.num_forwards


@pytest.mark.parametrize(
    "config",
    [
        {"use_chunked_prefill": False, "max_batch_size": 5},
        {"kv_cache_backend": "contiguous", "scheduler_policy": "prefill_first", "max_batch_size": 5},
        {"max_num_batched_tokens": 7, "max_batch_size": 4},
        {"spec_length": 1, "scheduler_policy": "decode_round_robin"},
    ],
    ids=lambda config: next(iter(config)),
)
def test_every_memory_and_policy_gives_the_same_outputs(
    tiny_checkpoints: dict[str, Path], config: dict[str, Any]
) -> None:
    folder, options = tiny_checkpoints["gemma3_text"], config | {"max_seq_len": 128}
    requests: Requests = [*ALIKE, *MIXED]
    answers = serve(make(folder, Plain, **options | {"spec_length": 5}), requests)[0]
    engine = make(folder, answers=answers, **options)
    for mine, theirs in zip(serve(engine, requests)[0], answers, strict=True):
        assert [(o.token_id, o.text, o.finish_reason, o.stop) for o in mine] == [
            (o.token_id, o.text, o.finish_reason, o.stop) for o in theirs
        ]
    assert has_guessed(engine)


@settings(max_examples=6, deadline=None)
@given(
    options=sizes(spec_length=st.integers(1, 8), overlap_scheduling=st.booleans()),
    error_rate=st.sampled_from([0.0, 0.3, 1.0]),
    load=loads(),
)
def test_whatever_the_sizes_arrivals_and_aborts(
    tiny_checkpoints: dict[str, Path], options: dict[str, Any], error_rate: float, load: Load
) -> None:
    folder = tiny_checkpoints["gemma3_text"]
    alone = answers_alone(Plain, folder)
    engine = make(folder, answers=alone, error_rate=error_rate, **options)
    assert_as_alone(engine, load, alone)
    assert engine.num_accepted > 0 or error_rate == 1
    assert engine.num_rejected > 0 or error_rate < 1


def test_an_end_inside_a_run_of_accepted_drafts_drops_the_rest(tiny_checkpoints: dict[str, Path]) -> None:
    """The drafts continue after a stop token, an end of sequence, a stop string and the length limit."""
    folder, options = tiny_checkpoints["qwen3"], {"max_seq_len": 64, "max_batch_size": 8, "block_size": 2}
    free: Requests = [("Once upon", {"seed": n, "max_new_tokens": 24, "ignore_eos": True}) for n in range(3)]
    answers = serve(make(folder, Plain, **options), free)[0]
    requests, foreseen = [], []
    for (prompt, params), answer in zip(free, answers, strict=True):
        text = "".join(output.text for output in answer)
        for n in range(1, 14):
            ends = {"stop_token_ids": [answer[n].token_id]}, {"stop": text[3 * n : 3 * n + 2]}, {"max_new_tokens": n}
            requests += [(prompt, params | end) for end in ends]
            foreseen += [answer] * len(ends)
    expected = serve(make(folder, Plain, **options), requests)[0]
    engine = make(folder, answers=foreseen, error_rate=0.2, **options)
    found = serve(engine, requests)[0]
    assert seen(found) == seen(expected)
    assert {answer[-1].finish_reason for answer in expected} == {FinishReason.STOP, FinishReason.LENGTH}
    assert has_guessed(engine)
    assert all(answer[-1].num_accepted_drafts < len(answer) for answer in found)
    num_accepted, num_rejected = (
        sum(getattr(answer[-1], name) for answer in found) for name in ("num_accepted_drafts", "num_rejected_drafts")
    )
    assert num_accepted + num_rejected == engine.num_accepted + engine.num_rejected
    assert num_accepted < engine.num_accepted, "some are accepted after a stop string"


def test_an_end_of_sequence_inside_a_run(folder: Path) -> None:
    """A bias makes it likely at each index of a run; the drafts continue after it, and never enter the prefix tree."""
    options = {"max_seq_len": 64, "block_size": 1}
    eos = min(make(folder, Plain, **options).tokenizer.eos_ids)
    requests: Requests = [([5 + n] * 3, {"seed": n, "max_new_tokens": 30, "logit_bias": {eos: 4.0}}) for n in range(12)]
    plain = make(folder, Plain, **options)
    expected = serve(plain, requests)[0]
    endless = [(ids, params | {"ignore_eos": True}) for ids, params in requests]
    answers = serve(make(folder, Plain, **options), endless)[0]
    engine = make(folder, answers=answers, error_rate=0.2, **options)
    assert seen(serve(engine, requests)[0]) == seen(expected)
    assert {answer[-1].finish_reason for answer in expected} >= {FinishReason.EOS}
    assert has_guessed(engine)
    assert engine.pool.extension.tree.num_blocks == plain.pool.extension.tree.num_blocks


@pytest.mark.parametrize("backend", ["paged", "contiguous"])
def test_rejected_drafts_leave_no_trace(model_folder: Path, backend: str) -> None:
    options: dict[str, Any] = {"max_seq_len": 80, "kv_cache_backend": backend}
    options |= {"block_size": 3, "num_gpu_blocks": 40} if backend == "paged" else {}
    request: Requests = [("A text, and more", PENALISED | {"max_new_tokens": 40, "ignore_eos": True})]
    answers = serve(make(model_folder, Plain, **options), request)[0]
    engine = make(model_folder, answers=answers, **options)
    assert_no_trace(make(model_folder, Plain, **options), engine, request)
    assert has_guessed(engine)


@pytest.mark.parametrize(
    ("broken", "overlaps"),
    [
        *(("drafter.propose", False), ("drafter.propose", True)),
        *(("runner.forward", False), ("runner.sample", True)),
        *(("scheduler.schedule", False), ("scheduler.commit", True), ("pool.layout", False)),
    ],
)
def test_an_interrupted_step_is_repeated_and_loses_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, broken: str, overlaps: bool
) -> None:
    options = SMALL | {"max_batch_size": 4}
    answers = serve(make(folder, Plain, **options), ALIKE, ARRIVE)[0]
    engine = make(folder, answers=answers, overlap_scheduling=overlaps, **options)
    interrupts = interrupt(engine, broken, monkeypatch)
    assert seen(serve(engine, ALIKE, ARRIVE)[0]) == seen(answers)
    assert len(interrupts) > 2
    assert has_guessed(engine)


def test_without_drafts_it_is_the_loop_of_phase_9(tiny_checkpoints: dict[str, Path]) -> None:
    folder, options = tiny_checkpoints["qwen3"], {"max_seq_len": 128, "max_batch_size": 3}
    for overlaps in (False, True):
        expected = serve(make(folder, Plain, **options, overlap_scheduling=overlaps), ALIKE)
        assert serve(Engine(EngineConfig(str(folder), **options, overlap_scheduling=overlaps)), ALIKE) == expected


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_with_rejection_sampling_greedy_tokens_are_the_same_and_others_are_repeatable(
    tiny_checkpoints: dict[str, Path], family: str
) -> None:
    folder, options = tiny_checkpoints[family], {"max_seq_len": 128, "acceptance_method": "rejection"}
    requests: Requests = [*ALIKE, *MIXED]
    plain = make(folder, Plain, max_seq_len=128)
    answers = serve(plain, requests)[0]
    engines = [make(folder, answers=answers, **options) for _ in range(2)]
    assert_greedy_same_and_others_repeatable(engines, requests, plain)
    assert has_guessed(engines[0])


@pytest.mark.parametrize("is_adaptive", [False, True])
def test_requests_with_and_without_drafts_share_a_batch(folder: Path, is_adaptive: bool) -> None:
    """Every other request refuses drafts."""
    options = {"max_seq_len": 128}
    requests: Requests = [
        (prompt, params | {"use_speculative_decoding": number % 2 == 0})
        for number, (prompt, params) in enumerate([*ALIKE, *MIXED])
    ]
    answers = serve(make(folder, Plain, **options), requests)[0]
    engine = make(folder, answers=answers, adapt_spec_length=is_adaptive, **options)
    engine.scheduler.lengths.costs_of = a_tenth  # type: ignore[attr-defined]
    commit, steps = engine.scheduler.commit, []

    def noted(schedule: Schedule, sampled: Any) -> None:
        steps.append([(int(entry.request.request_id), entry.num_drafts) for entry in schedule.decoding])
        commit(schedule, sampled)

    engine.scheduler.commit = noted
    found = serve(engine, requests)[0]
    assert seen(found) == seen(answers)
    assert has_guessed(engine)
    drafted = {number for step in steps for number, num_drafts in step if num_drafts}
    assert drafted <= set(range(0, len(requests), 2))
    tried = [answer[-1].num_accepted_drafts + answer[-1].num_rejected_drafts > 0 for answer in found]
    assert not any(tried[1::2])
    assert is_adaptive or all(tried[: len(ALIKE) : 2])
    assert sum(answer[-1].num_rejected_drafts for answer in found) == engine.num_rejected
    assert sum(engine.scheduler.num_accepted_by_position) == engine.num_accepted
    assert any(any(n for _, n in step) and any(number % 2 for number, _ in step) for step in steps), "in one batch"


def test_adaptive_lengths_change_no_token_and_useless_drafts_become_few(
    tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, options = tiny_checkpoints["qwen3"], {"max_seq_len": 128, "adapt_spec_length": None}
    requests: Requests = [([n, *range(9)], {"seed": n, "max_new_tokens": 100, "ignore_eos": True}) for n in range(4)]
    answers = serve(plain := make(folder, Plain, max_seq_len=128), requests)[0]
    good, useless = (make(folder, answers=answers, error_rate=rate, **options) for rate in (0.1, 0.0))
    for engine in (good, useless):
        engine.scheduler.lengths.costs_of = a_tenth
    useless.drafter.answers = [[token_id ^ 1 for token_id in answer] for answer in useless.drafter.answers]
    short, plan = [0], speculative.grant_next_tokens
    monkeypatch.setattr(
        speculative, "grant_next_tokens", lambda owner, decoding: short.append(len(decoding)) or plan(owner, decoding)
    )
    for engine in (good, useless):
        assert seen(serve(engine, requests)[0]) == seen(answers)
    assert good.runner.num_forwards < plain.runner.num_forwards / 2
    assert useless.num_accepted == 0
    assert sum(short) > 0.8 * 400, "a step without drafts is planned the short way"
    assert useless.num_rejected * 0.1 < 0.03 * 400, "of the time of 400 plain steps, if a draft takes a tenth of one"

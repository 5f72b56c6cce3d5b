"""Phase 11.1 gives the tokens of plain decoding, whatever the adapter guesses."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phases.phase_11_1.engine import Engine
from shared.engine.config import EngineConfig
from shared.errors import ModelFolderError
from shared.speculation.adaptive import DraftCosts
from tests.adapters import random_adapter_of
from tests.drafts import Foresight, assert_greedy_same_and_others_repeatable, assert_no_trace, check_commits
from tests.mixed_requests import ALIKE, ARRIVALS, ARRIVE, GREEDY, MIXED, PENALISED, SMALL, Requests, seen, serve
from tests.random_loads import Load, answers_alone, assert_as_alone, interrupt, loads, sizes

MULTI: dict[str, Any] = {"use_speculative_decoding": True, "adapt_spec_length": False}


class Checked(Engine):
    """Checks what each step leaves behind."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        check_commits(self)

    def has_guessed(self) -> bool:
        """Whether some guesses were accepted and some rejected."""
        return self.scheduler.num_accepted_drafts > 0 and self.scheduler.num_rejected_drafts > 0


def plain(folder: Path, **config: Any) -> Engine:
    """The same engine without guesses: the loop of phase 10."""
    return Engine(EngineConfig(str(folder), **config))


def guessing(folder: Path, answers: Any = None, error_rate: float = 0.5, **config: Any) -> Checked:
    """An engine with a random adapter; ``answers``: its guesses are these, some of them with an error."""
    engine = Checked(EngineConfig(str(folder), adapter=str(random_adapter_of(folder)), **MULTI | config))
    if answers is not None:
        engine.drafter = Foresight([[o.token_id for o in answer] for answer in answers], error_rate)  # type: ignore
    return engine


@pytest.mark.parametrize(
    ("family", "sizes", "overlaps"),
    [("llama", (1, 129), False), ("qwen3", (16, 9), False), ("gemma3_text", (3, 43), True)],
)
def test_outputs_are_those_of_plain_decoding(
    tiny_checkpoints: dict[str, Path], family: str, sizes: tuple[int, int], overlaps: bool
) -> None:
    """Greedy and sampled, with penalties, chunks, shared prefixes, preemptions; guesses of an adapter, and imposed."""
    options = SMALL | {"prefill_chunk_size": 30} | dict(zip(("block_size", "num_gpu_blocks"), sizes, strict=True))
    requests, arrivals = [*ALIKE, *MIXED], [*ARRIVE, *ARRIVALS]
    folder = tiny_checkpoints[family]
    answers = serve(reference := plain(folder, **options), requests, arrivals)[0]
    num_preemptions = 0
    for foreseen, arrive in ((None, arrivals), (answers, [0] * len(requests))):
        engine = guessing(folder, foreseen, overlap_scheduling=overlaps, **options)
        assert seen(serve(engine, requests, arrive)[0]) == seen(answers)
        assert engine.has_guessed()
        assert engine.scheduler.num_prefix_hits > 0
        assert engine.load().kv_usage == 0
        num_preemptions += engine.load().num_preemptions
    assert num_preemptions > 0 or sizes[0] == 16
    assert engine.runner.num_forwards < reference.runner.num_forwards


@pytest.mark.parametrize(
    "config",
    [
        {"max_num_batched_tokens": 17, "max_batch_size": 4, "scheduler_policy": "decode_round_robin"},
        {"quantization": "int8", "attention_backend": "naive"},
    ],
    ids=lambda config: next(iter(config)),
)
def test_other_schedules_backends_and_weights(tiny_checkpoints: dict[str, Path], config: dict[str, Any]) -> None:
    folder, options = tiny_checkpoints["gemma3_text"], config | {"max_seq_len": 128}
    requests: Requests = [*ALIKE, *MIXED]
    answers = serve(plain(folder, **options), requests)[0]
    for foreseen in (None, answers):
        engine = guessing(folder, foreseen, **options)
        for mine, theirs in zip(serve(engine, requests)[0], answers, strict=True):
            assert [(o.token_id, o.text, o.finish_reason) for o in mine] == [
                (o.token_id, o.text, o.finish_reason) for o in theirs
            ]
        assert engine.has_guessed()


@settings(max_examples=6, deadline=None)
@given(
    options=sizes(120, spec_length=st.integers(1, 3), overlap_scheduling=st.booleans()),
    error_rate=st.sampled_from([0.0, 0.3, 1.0]),
    load=loads(),
)
def test_whatever_the_sizes_arrivals_and_aborts(
    tiny_checkpoints: dict[str, Path], options: dict[str, Any], error_rate: float, load: Load
) -> None:
    folder = tiny_checkpoints["gemma3_text"]
    alone = answers_alone(Engine, folder)
    assert_as_alone(guessing(folder, alone, error_rate, **options), load, alone)


def test_masks_and_rejected_guesses_leave_no_trace(model_folder: Path) -> None:
    options: dict[str, Any] = {"max_seq_len": 80, "block_size": 3, "num_gpu_blocks": 40}
    request: Requests = [("A text, and more", PENALISED | {"max_new_tokens": 40, "ignore_eos": True})]
    answers = serve(plain(model_folder, **options), request)[0]
    engine = guessing(model_folder, answers, **options)
    assert_no_trace(plain(model_folder, **options), engine, request)
    assert engine.has_guessed()


@pytest.mark.parametrize("broken", ["drafter.propose", "runner.forward", "scheduler.commit", "pool.layout"])
def test_an_interrupted_step_is_repeated_and_loses_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    options = SMALL | {"max_batch_size": 4}
    answers = serve(plain(folder, **options), ALIKE, ARRIVE)[0]
    engine = guessing(folder, answers if broken != "drafter.propose" else None, overlap_scheduling=True, **options)
    interrupts = interrupt(engine, broken, monkeypatch)
    assert seen(serve(engine, ALIKE, ARRIVE)[0]) == seen(answers)
    assert len(interrupts) > 2
    assert engine.scheduler.num_rejected_drafts > 0


def test_requests_with_and_without_guesses_share_steps(tiny_checkpoints: dict[str, Path]) -> None:
    folder = tiny_checkpoints["qwen3"]
    requests: Requests = [
        (ids, params | {"use_speculative_decoding": n % 2 == 0}) for n, (ids, params) in enumerate(ALIKE)
    ]
    answers = serve(plain(folder, max_seq_len=128), requests)[0]
    engine = guessing(folder, answers, max_seq_len=128)
    found = serve(engine, requests)[0]
    assert seen(found) == seen(answers)
    drafted = [answer[-1].num_accepted_drafts + answer[-1].num_rejected_drafts > 0 for answer in found]
    assert drafted == [n % 2 == 0 for n in range(len(requests))]


def test_with_rejection_sampling_greedy_tokens_are_the_same_and_others_are_repeatable(folder: Path) -> None:
    options = {"max_seq_len": 128}
    requests: Requests = [*ALIKE, *MIXED]
    engines = [guessing(folder, acceptance_method="rejection", **options) for _ in range(2)]
    assert_greedy_same_and_others_repeatable(engines, requests, plain(folder, **options))
    assert engines[0].has_guessed()


def test_useless_guesses_cost_few_steps_where_steps_are_bound_by_launches(folder: Path) -> None:
    """With the costs of the demo model's shape on an H100; steps between attempts are those of plain decoding."""
    options = {"max_seq_len": 512, "max_batch_size": 2, "overlap_scheduling": True}
    requests: Requests = [([5, 6, 7], GREEDY | {"max_new_tokens": 300})]
    reference = plain(folder, **options)
    answers = serve(reference, requests)[0]
    wrong = [[output._replace(token_id=(output.token_id or 0) ^ 1) for output in answers[0]]]
    engine = guessing(folder, wrong, error_rate=0.0, adapt_spec_length=True, **options)
    engine.scheduler.lengths.costs_of = lambda *_: DraftCosts(0.528, 1.292, 1.299, 0.107, 0.107)
    before, launch = engine.stats(), engine.runner.forward
    kinds: list[tuple[bool, bool]] = []

    def forward(batch: Any) -> Any:
        kinds.append((batch.num_tokens == 1 and not len(batch.num_masks), engine.in_flight is not None))
        return launch(batch)

    engine.runner.forward = forward  # type: ignore[method-assign]
    assert seen(serve(engine, requests)[0]) == seen(answers)
    found, wanted = engine.stats(), reference.stats()
    assert found["forward passes"] - before["forward passes"] <= 1.02 * wanted["forward passes"]
    assert wanted["tokens computed"] < found["tokens computed"] - before["tokens computed"]
    assert found["tokens computed"] - before["tokens computed"] <= 1.02 * wanted["tokens computed"]
    plainly = [is_in_flight for is_plain, is_in_flight in kinds if is_plain]
    assert sum(plainly) >= 0.96 * len(kinds), "launched while the step before it runs"
    assert engine.scheduler.num_rejected_drafts >= 2


def test_a_folder_without_an_adapter_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"has no adapter\.json"):
        Engine(EngineConfig(str(folder), **MULTI, adapter=str(tmp_path)))

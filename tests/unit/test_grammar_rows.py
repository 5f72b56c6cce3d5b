"""Masks that the sampler's device finds give the tokens of masks made on the host, whatever happens to the requests.

Without a GPU the rows and the pool are on the CPU, and the scalar walk stands in for the kernels, which have tests of
their own (tests/kernels/test_grammar.py).
"""

import gc
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shared.engine.sampling.grammar_rows as grammar_rows
from phases.phase_12.engine import Engine
from shared.engine.config import EngineConfig
from shared.engine.executor.graphs import RecordedDraw
from shared.engine.output import StepOutput
from shared.engine.warm_up import warm_up
from shared.grammar.constraint import Constraint
from shared.grammar.grammar import Grammar
from shared.grammar.limits import Limits
from shared.grammar.tokens.fsm import FSMCompiler
from shared.grammar.tokens.pool import GrammarPool
from shared.grammar.tokens.vocabulary import GrammarVocabulary
from shared.sampling.params import SamplingParams
from shared.sampling.sampler import SamplingRow
from shared.scheduling.schedule import Schedule
from shared.text.stopping import FinishReason
from tests.constrained import DRAWN, GRAMMARS, NGRAM, PATTERNS, constrained
from tests.drafts import Foresight
from tests.mixed_requests import ALIKE, ARRIVALS, ARRIVE, MIXED, SMALL, STEM, seen, serve, tokens

REQUESTS, COME = [*constrained([*ALIKE, *MIXED], max_new_tokens=60), *DRAWN], [*ARRIVE, *ARRIVALS, 0, 2, 2, 4]


def make(folder: Path, num_bytes: int | None = 1_000_000, **config: Any) -> Any:
    """An engine with a pool on the CPU; None: without one."""
    with pytest.MonkeyPatch.context() as patch:
        pool = None if num_bytes is None else GrammarPool(num_bytes, "cpu")
        patch.setattr(GrammarPool, "on", lambda *_: pool)
        return Engine(EngineConfig(model=str(folder), **config))


def rows_of(engine: Engine) -> grammar_rows.GrammarRows:
    """The step of the engine's sampler that finds masks."""
    (step,) = (step for step in engine.runner.sampler.steps if isinstance(step, grammar_rows.GrammarRows))
    return step


@pytest.fixture
def num_sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A list that grows with each configuration that the host sends."""
    sent: list[int] = []
    pack = grammar_rows.pack_row
    monkeypatch.setattr(grammar_rows, "pack_row", lambda base, now: sent.append(base) or pack(base, now))
    return sent


@pytest.mark.parametrize(("family", "overlaps"), [("llama", True), ("qwen3", False), ("gemma3_text", True)])
def test_tokens_are_those_of_masks_from_the_host(
    tiny_checkpoints: dict[str, Path], family: str, overlaps: bool, num_sent: list[int]
) -> None:
    model_folder = tiny_checkpoints[family]
    options = SMALL | {"prefill_chunk_size": 30, "overlap_scheduling": overlaps}
    expected = serve(make(model_folder, None, **options), REQUESTS, COME)[0]
    assert not num_sent
    engine = make(model_folder, **options)
    assert seen(serve(engine, REQUESTS, COME)[0]) == seen(expected)
    num_preempted = engine.load().num_preemptions
    assert num_preempted > 0
    num_bound = sum("structured_output" in params for _, params in REQUESTS)
    assert len(num_sent) <= num_bound + num_preempted, "a row goes on from its own token"
    assert engine.constraints.num_masks > 5 * len(num_sent)
    serve(engine, [("x", {"max_new_tokens": 2})])
    gc.collect()
    assert all(one.num_holders == 0 for one in engine.constraints.pool._ranges.values()), "requests that ended hold it"


def test_drafts_go_on_from_the_row_behind_the_accepted_ones(folder: Path, num_sent: list[int]) -> None:
    requests, options = [*constrained(ALIKE, max_new_tokens=40), *DRAWN], {"max_seq_len": 160}
    expected = serve(make(folder, None, **options), requests)[0]
    for drafter in (None, Foresight(list(map(tokens, expected)), 0.5)):
        num_sent.clear()
        engine = make(folder, **options | NGRAM)
        engine.drafter = drafter or engine.drafter
        assert seen(serve(engine, requests)[0]) == seen(expected)
        stats = engine.stats()
        assert stats["drafts rejected (tokens)"] > 0
        assert stats["drafts accepted (tokens)"] > 0 or drafter is None
        assert len(num_sent) <= sum("structured_output" in params for _, params in requests)


def test_rows_behind_wrong_drafts_are_not_used_again(folder: Path) -> None:
    """The next step has as many rows, each one token further on."""
    grammar = Grammar.regex(r"(\d{3}-[a-c]{4}; ){5}")
    request = [("x", {"temperature": 0.0, "max_new_tokens": 60, "structured_output": grammar})]
    expected = serve(make(folder, None), request)[0]
    engine = make(folder, **NGRAM)
    right, number = Foresight(list(map(tokens, expected)), 0.0), 0

    def propose(schedule: Schedule) -> None:
        nonlocal number
        right.propose(schedule)
        number += 1
        for request in schedule.requests:
            if request.draft_ids and number % 2:
                request.draft_ids[0] ^= 1

    engine.drafter.propose = propose
    assert seen(serve(engine, request)[0]) == seen(expected)
    assert number > 8


def test_drafts_that_rejection_replaces(folder: Path) -> None:
    """A row advances by the token that replaces its draft, and not by the one sampled before."""
    grammar = Grammar.regex(r"(a[0-4]|b[5-9]|c[k-p]){30}")
    requests = [("x", {"temperature": 1.0, "seed": seed, "structured_output": grammar}) for seed in range(3)]
    options = NGRAM | {"acceptance_method": "rejection", "max_seq_len": 160}
    assert seen(serve(make(folder, **options), requests)[0]) == seen(serve(make(folder, None, **options), requests)[0])


def test_tags_of_overwritten_rows_are_forgotten() -> None:
    vocabulary = GrammarVocabulary.of_tokens([b"</s>", b"a", b"b", b"c", b"d"], [0])
    pool, compiler = GrammarPool(1_000_000, "cpu"), FSMCompiler(vocabulary, Limits())

    def constraint(pattern: str) -> Constraint:
        grammar = Grammar.regex(pattern)
        fsm = compiler.compile(grammar)
        found = Constraint(grammar, fsm, fsm.initial_state)
        found.base = pool.hold(grammar, fsm, found)
        return found

    def row(serial: int, grammar: Constraint | None, *outputs: int, **more: Any) -> SamplingRow:
        index = len(outputs)
        return SamplingRow(SamplingParams(), 0, index, [1], [*outputs], serial=serial, constraint=grammar, **more)

    def allowed(some: list[SamplingRow], at: list[int], ids: list[int] | None = None) -> list[list[int]] | None:
        """The tokens that are allowed in each row; with ``ids`` None, the draw then fails."""
        entered = rows.enter(some, at)
        if entered is None:
            return None
        logits = rows.remove_refused(entered, torch.zeros(len(some), 5))
        if ids is not None:
            if not rows.has_drafts:
                rows.advance(entered, torch.tensor(ids))
            rows.follow(entered, torch.tensor(ids))
        return [(each == 0).nonzero()[:, 0].tolist() for each in logits]

    free, ab, cd = row(9, None), constraint("ab"), constraint("cd")
    rows = grammar_rows.GrammarRows(8, pool)
    assert allowed([row(1, ab)], [0], [1]) == [[1]]
    assert allowed([free], [4]) is None, "the first request is preempted"
    assert allowed([row(2, cd)], [0]) == [[3]], "another draws in its row, and fails"
    assert allowed([row(1, ab, 1)], [0]) == [[2]]

    either, rows = constraint("(a|b)(a|b)(a|b)|c[cd]d"), grammar_rows.GrammarRows(8, pool)
    drafted = row(1, either, 3, num_drafts=1)
    assert allowed([row(1, either, draft_id=3), drafted], [0, 1], [1, 4]) == [[1, 2, 3], [3, 4]], "c is rejected"
    assert allowed([free], [4]) is None
    assert allowed([row(1, either, 1)], [3], [2]) == [[1, 2]], "it resumes in another row"
    assert allowed([free], [4]) is None
    assert allowed([row(1, either, 1, 2)], [0]) == [[1, 2]], "where it had been after c and d"

    rows = grammar_rows.GrammarRows(8, pool)
    ab, cd, bd = map(constraint, ("ab", "cd", "bd"))
    assert allowed([row(1, ab), row(2, cd)], [0, 1], [1, 3]) == [[1], [3]]
    chosen = rows.chosen

    class Interrupted:
        def __getitem__(self, part: slice) -> Any:
            return SimpleNamespace(copy_=lambda new: interrupt(chosen[part].copy_(new)))

    def interrupt(_: torch.Tensor) -> None:
        raise KeyboardInterrupt

    rows.chosen = cast(Any, Interrupted())
    with pytest.raises(KeyboardInterrupt):
        rows.enter([row(1, ab, 1), row(2, cd, 3), row(3, bd)], [0, 1, 2])
    rows.chosen = chosen
    assert allowed([row(1, ab, 1), row(2, cd, 3)], [0, 1]) == [[2], [4]]


def test_the_tokens_are_on_the_device_before_the_first_request(tiny_checkpoints: dict[str, Path]) -> None:
    engine = make(tiny_checkpoints["llama"])
    warm_up(engine)
    assert rows_of(engine).tokens is not None
    assert not engine.has_work()


def test_log_probabilities_and_min_tokens(folder: Path) -> None:
    for more in ({"logprobs": 3}, {"min_tokens": 12}):
        params = SamplingParams(temperature=0, max_new_tokens=30, structured_output=GRAMMARS[3], **more)
        host, device = (list(make(folder, pool).generate([1, 2, 3], params)) for pool in (None, 1_000_000))
        assert tokens(device) == tokens(host)
        assert len(host) >= (params.min_tokens or 1)
        assert [output.logprobs for output in device] == [output.logprobs for output in host]


@pytest.mark.parametrize("most_others", [0, 6])  # without others, the steps are those of one run
@pytest.mark.parametrize("last", ["advance", "follow"])  # what is done before the interruption
def test_a_step_that_is_interrupted_behind_its_draw_is_repeated(last: str, most_others: int, folder: Path) -> None:
    params = SamplingParams(temperature=0, max_new_tokens=30, structured_output=Grammar.regex(r"\d{3}-[a-c]{4}"))
    expected = tokens(list(make(folder).generate([1, 2, 3], params)))
    engine = make(folder, overlap_scheduling=False)
    rows, found, number = rows_of(engine), [], 0
    move = getattr(rows, last)

    def move_and_fail(*options: Any) -> None:
        nonlocal number
        number += 1
        move(*options)
        if number % 3 == 0:
            raise KeyboardInterrupt

    setattr(rows, last, move_and_fail)
    engine.add_request([1, 2, 3], params, request_id="long")
    while engine.has_work():
        if number % 2 == 0 and len(found) < most_others:  # other rows than in the step before
            engine.add_request([4, 5], SamplingParams(max_new_tokens=2), request_id=f"{number} {len(found)}")
        try:
            found += tokens([output for output in engine.step() if output.request_id == "long"])
        except KeyboardInterrupt:
            continue
    assert found == expected
    assert number > len(expected)


@settings(max_examples=12)
@given(
    chosen=st.lists(st.integers(0, len(GRAMMARS)), min_size=1, max_size=6),
    aborted=st.sets(st.integers(0, 5), max_size=3),
    length=st.integers(0, 4),
    overlaps=st.booleans(),
    num_bytes=st.sampled_from([2_000, 12_000, 100_000]),
)
def test_any_mixture_in_a_pool_of_any_size(
    tiny_checkpoints: dict[str, Path], chosen: list[int], aborted: set[int], length: int, overlaps: bool, num_bytes: int
) -> None:
    options: dict[str, Any] = SMALL | {"overlap_scheduling": overlaps}
    options |= NGRAM | {"spec_length": length} if length else {}
    results = []
    for pool in (None, num_bytes):
        engine = make(tiny_checkpoints["llama"], pool, **options)
        for n, number in enumerate(chosen):
            params = SamplingParams(seed=n, max_new_tokens=30, structured_output=(*GRAMMARS, None)[number])
            engine.add_request(STEM[: 5 + 9 * n], params, request_id=str(n))
        outputs, step = list[StepOutput](), 0
        while engine.has_work():
            step += 1
            if step == 5:
                for n in aborted:
                    engine.abort(str(n))
            outputs += engine.step()
        assert engine.pool.audit() == []
        results.append([[output for output in outputs if output.request_id == str(n)] for n in range(len(chosen))])
    assert seen(results[0]) == seen(results[1])
    for number, answer in zip(chosen, results[0], strict=True):
        if number < len(PATTERNS) and answer and answer[-1].finish_reason is FinishReason.EOS:
            assert re.fullmatch(PATTERNS[number], "".join(output.text for output in answer))


@pytest.mark.gpu
@pytest.mark.parametrize("drafting", [{}, NGRAM])
def test_tokens_on_the_gpu_are_those_of_the_cpu(tiny_checkpoints: dict[str, Path], drafting: dict[str, Any]) -> None:
    options: dict[str, Any] = {"max_seq_len": 160, "max_batch_size": 8, "dtype": "float32"}
    for folder in tiny_checkpoints.values():
        expected = serve(make(folder, None, **options), REQUESTS, COME)[0]
        engine = Engine(EngineConfig(model=str(folder), device="cuda", **options | drafting))
        assert engine.constraints.pool is not None
        assert seen(serve(engine, REQUESTS, COME)[0]) == seen(expected)


@pytest.mark.gpu
def test_a_draw_that_comes_again_is_recorded(tiny_checkpoints: dict[str, Path]) -> None:
    grammar = Grammar.regex(r"(\d{3}-[a-c]{4}; ){6}")
    options: dict[str, Any] = {"max_seq_len": 160, "dtype": "float32"}
    params: list[dict[str, Any]] = [{}, {"temperature": 0.9, "seed": 3}, {"temperature": 0.9, "top_p": 0.8, "seed": 4}]
    requests = [
        (f"{n}-{stem}", {"temperature": 0.0, "max_new_tokens": 70, "structured_output": grammar} | more)
        for n, more in enumerate(params)
        for stem in ("a", "bb")
    ]
    folder = tiny_checkpoints["llama"]
    engine = Engine(EngineConfig(model=str(folder), device="cuda", **options))
    assert seen(serve(engine, requests)[0]) == seen(serve(make(folder, None, **options), requests)[0])
    recorder: Any = engine.runner.sampler.recorder
    assert any(isinstance(draw, RecordedDraw) for draw in recorder.known.values())

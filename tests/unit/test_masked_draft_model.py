"""A draft model under a grammar proposes what the grammar allows: with masks of the host, and of the device."""

import itertools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from shared.checkpoints.make import make_checkpoint
from shared.checkpoints.shapes import SHAPES
from shared.grammar.constraint import Constraint
from shared.grammar.grammar import Grammar
from shared.sampling.params import SamplingParams
from shared.sampling.sampler import SamplingRow
from shared.scheduling.schedule import Schedule
from shared.speculation.draft_masks import DeviceMasks
from tests.drafts import num_refused
from tests.mixed_requests import seen, serve
from tests.unit.test_grammar_rows import make

GRAMMARS = [
    Grammar.regex(r"[a-z]{3,9}( [a-z]{3,9}){3,5}\."),
    Grammar.json_schema({"type": "array", "items": {"type": "integer"}, "minItems": 6, "maxItems": 9}),
]
SETTINGS: dict[str, Any] = {"max_seq_len": 160, "max_batch_size": 4}
REQUESTS = [
    ([3 + n, 5, 9], {"max_new_tokens": 50} | options | {"structured_output": GRAMMARS[n % 2]})
    for n, options in enumerate(
        ({"temperature": 0.0}, {"temperature": 0.0, "max_new_tokens": 7}, {"seed": 3}, {"seed": 4})
    )
] + [([7, 7], {"max_new_tokens": 20, "seed": 5})]


def drafting(folder: Path, pool: int | None, method: str, draft: Path | None = None, *, is_masked: bool = True) -> Any:
    """An engine whose draft model is by default the model itself; notes the drafts that the grammar refuses."""
    options = {
        "use_speculative_decoding": True,
        "draft_model": str(draft or folder),
        "adapt_spec_length": False,
        "spec_length": 4,
    }
    engine = make(folder, pool, **SETTINGS, **options, acceptance_method=method)
    inner = engine.drafter.drafter
    inner.is_masked &= is_masked
    propose, engine.num_refused = inner.propose, 0

    def noting(schedule: Schedule) -> None:
        propose(schedule)
        inner.collect()
        engine.num_refused += sum(num_refused(entry.request) for entry in schedule if entry.num_drafts)

    inner.propose = noting
    return engine


@pytest.mark.parametrize(("family", "pool"), [("llama", None), ("qwen3", 1_000_000), ("gemma3_text", 1_000_000)])
def test_a_model_that_drafts_for_itself_is_right(
    tiny_checkpoints: dict[str, Path], family: str, pool: int | None
) -> None:
    """With the same noise and the same masks all drafts are accepted, but for those after an output's end."""
    model_folder = tiny_checkpoints[family]
    answers = serve(make(model_folder, pool, **SETTINGS), REQUESTS)[0]
    masked = drafting(model_folder, pool, "coupled")
    assert seen(serve(masked, REQUESTS)[0]) == seen(answers)
    assert masked.num_refused == 0
    stats = masked.stats()
    assert stats["drafts accepted (tokens)"] > 50
    assert stats["drafts rejected (tokens)"] <= 4 * len(REQUESTS)
    if pool is not None:  # a greedy draft advances its row as a sampled one does
        alone = drafting(model_folder, pool, "rejection")
        for request in REQUESTS[:2]:
            serve(alone, [request])
        assert alone.stats()["drafts rejected (tokens)"] == 0
    free = drafting(model_folder, pool, "coupled", is_masked=False)
    assert seen(serve(free, REQUESTS)[0]) == seen(answers)
    assert free.num_refused > 0
    assert free.runner.num_forwards > masked.runner.num_forwards


def test_drafts_of_a_model_with_fewer_logits_stay_unmasked(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        SHAPES, "padded", SHAPES["tiny-llama"] | {"vocab_size": SHAPES["tiny-llama"]["vocab_size"] + 40}
    )
    target = make_checkpoint("padded", tmp_path)
    for path in tiny_checkpoints["llama"].glob("tokenizer*"):
        shutil.copyfile(path, target / path.name)
    engine = drafting(target, None, "coupled", tiny_checkpoints["llama"])
    assert seen(serve(engine, REQUESTS)[0]) == seen(serve(make(target, None, **SETTINGS), REQUESTS)[0])
    assert engine.num_refused > 0


@pytest.mark.failing_forwards
def test_a_draft_that_cannot_be_computed_takes_no_mask_from_others(
    tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = drafting(tiny_checkpoints["llama"], None, "coupled")
    forward, calls = engine.drafter.drafter.model.forward, itertools.count()

    def failing(*args: Any) -> torch.Tensor:
        if next(calls) % 9 < 3:  # of four requests the first, which is tried alone after all and after two
            raise RuntimeError("no memory")
        result: torch.Tensor = forward(*args)
        return result

    monkeypatch.setattr(engine.drafter.drafter.model, "forward", failing)
    answers = serve(make(tiny_checkpoints["llama"], None, **SETTINGS), REQUESTS)[0]
    assert (seen(serve(engine, REQUESTS)[0]), engine.num_refused) == (seen(answers), 0)


def test_the_device_masks_no_row_whose_end_is_forbidden_or_whose_tables_are_not_there() -> None:
    """The grammar may allow nothing but the end, and then the end is not forbidden; that the host alone knows."""
    loaded, absent = (Constraint(GRAMMARS[0], cast(Any, None), None, base=base) for base in (0, None))
    row = SamplingRow(SamplingParams(), 0, 1, [1], [2])
    cases = [(row, loaded), (row._replace(masked_ids=(2,)), loaded), (row, absent), (row, None)]
    asking: Any = [(SimpleNamespace(constraint=constraint), None, 1) for _, constraint in cases]
    rows = DeviceMasks(cast(Any, None)).rows([each for each, _ in cases], asking, ())
    assert [each.constraint for each in rows] == [loaded, None, None, None]


@pytest.mark.parametrize("pool", [None, 1_000_000])
def test_rejection_sampling_knows_the_masked_distribution(tiny_checkpoints: dict[str, Path], pool: int | None) -> None:
    """The draft's distribution is the target's, so that all drafts are accepted; with unmasked ones few are."""
    engine = drafting(tiny_checkpoints["qwen3"], pool, "rejection")
    inner, sums = engine.drafter.drafter, []
    propose = inner.propose

    def noting(schedule: Schedule) -> None:
        propose(schedule)
        sums.extend(float(q.sum()) for q in inner.distributions.values())

    inner.propose = noting
    answers = serve(engine, REQUESTS)[0]
    assert torch.allclose(torch.tensor(sums), torch.ones(len(sums)))
    assert engine.num_refused == 0
    assert engine.stats()["drafts rejected (tokens)"] <= 4 * len(REQUESTS)
    for answer, (_, params) in zip(answers, REQUESTS, strict=True):
        if params.get("structured_output") is GRAMMARS[1] and answer[-1].finish_reason == "stop":
            assert 6 <= len(json.loads("".join(output.text for output in answer))) <= 9

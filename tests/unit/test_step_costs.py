"""The table of step costs: what it derives from a model's shape, where it is kept, and what follows from it."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from benchmarks.step_costs import step_seconds, table_of
from phases.phase_11.engine import Engine
from shared.checkpoints.shapes import SHAPES
from shared.cli import app
from shared.engine.config import EngineConfig
from shared.errors import ConfigError
from shared.loading.config_json import parse_config
from shared.loading.loader import load_model
from shared.loading.quantized import quantizer
from shared.models.causal_lm import CausalLM
from shared.models.fused import fuse
from shared.models.packed import SUPPORTED_ENGINES, pack
from shared.scheduling import step_costs
from shared.scheduling.step_costs import StepCosts
from shared.speculation.adaptive import DraftLengths
from shared.speculation.draft_costs import TableCosts
from tests.unit.test_adaptive import spent_on_useless

TABLE = StepCosts((1, 2, 8), (1.0, 1.5, 4.5), key=0.25, wait=2.0)
NGRAM: dict[str, Any] = {"use_speculative_decoding": True, "drafter": "ngram"}


def shape(name: str, dtype: torch.dtype = torch.bfloat16) -> CausalLM:
    """A model without weights, which takes no memory."""
    model = CausalLM(parse_config(SHAPES[name]), 1, "meta").to(dtype)
    if model.config.tie_word_embeddings:
        model.head.weight = model.embedding.weight
    return model


@pytest.mark.parametrize(
    ("counts", "seconds"),
    [((1,), 1.0), ((2,), 1.5), ((4,), 2.5), ((10,), 5.5), ((4, 2), 3.0), ((4, 2, 1), 5.0), ((4, 0, 3), 4.5)],
    ids=str,
)
def test_costs_between_the_counts_of_the_table_and_beyond_them(counts: tuple[int, ...], seconds: float) -> None:
    assert TABLE.cost(*counts) == seconds


tables = st.builds(
    lambda steps, key, wait: StepCosts(
        tuple(n + 1 for n in range(len(steps))), tuple(sum(steps[: n + 1]) for n in range(len(steps))), key, wait
    ),
    st.lists(st.floats(1e-6, 1.0), min_size=2, max_size=6),
    st.floats(0, 1e-3),
    st.floats(0, 1e-2),
)
counts = st.tuples(st.integers(1, 10_000), st.integers(0, 10**6), st.integers(0, 10_000))


@example(table=TABLE, few=(1, 0, 0), more=(0, 0, 1))
@given(table=tables, few=counts, more=st.tuples(*[st.integers(0, 1000)] * 3))
def test_costs_are_positive_and_never_fall(
    table: StepCosts, few: tuple[int, int, int], more: tuple[int, int, int]
) -> None:
    assert (
        0 < table.cost(*few) <= table.cost(*(low + extra for low, extra in zip(few, more, strict=True))) * (1 + 1e-12)
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"seconds": (1.0, 0.5, 2.0)},
        {"seconds": (0.0, 0.5, 2.0)},
        {"seconds": (1.0, 2.0)},
        {"seconds": (1.0, 2.0, float("nan"))},
        {"tokens": (1, 8, 2)},
        {"tokens": (0, 1, 8)},
        {"tokens": (2, 3, 8)},
        {"key": -1.0},
        {"wait": float("inf")},
        {"tokens": (1,), "seconds": (1.0,)},
    ],
    ids=str,
)
def test_a_table_whose_costs_fall_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="tokens must ascend from 1, and costs must be positive and not fall"):
        StepCosts(**{"tokens": (1, 2, 8), "seconds": (1.0, 1.5, 4.5)} | wrong)


def test_the_hash_names_the_whole_table() -> None:
    changes: list[dict[str, Any]] = [{}, {"key": 0.5}, {"wait": 1.0}, {"source": "measured"}, {"of": {"dtype": "x"}}]
    made = [StepCosts(**{"tokens": (1, 2), "seconds": (1.0, 1.5)} | change) for change in changes]
    assert len({table.hash for table in made}) == len(made)
    assert [StepCosts.from_json(table.to_json()) for table in made] == made
    assert [StepCosts.from_json(table.to_json()).hash for table in made] == [table.hash for table in made]


def test_costs_are_derived_from_bytes_and_operations(tiny_checkpoints: dict[str, Path]) -> None:
    rates = step_costs.CPU
    for name in ("qwen3-0.6b", "llama-3.2-3b", "qwen3-8b", "gemma-3-1b"):
        model = shape(name)
        table = step_costs.derived(model)
        c, head = model.config, model.head.weight.numel()
        count = sum(p.numel() for p in model.parameters()) - (0 if c.tie_word_embeddings else head)
        expected = c.num_layers * rates.layer + 2 * count / rates.bytes + 2 * count / (rates.operations)
        assert table.cost(1) == pytest.approx(expected, rel=1e-3)
        kv_bytes = 2 * c.num_layers * c.num_kv_heads * c.head_dim * 2
        assert table.cost(1, 1000) - table.cost(1) == pytest.approx(1000 * kv_bytes / rates.bytes, rel=1e-3)
        of_head = step_costs.head_costs(model)
        expected = step_costs.HEAD_LAYERS * rates.layer + 2 * head / rates.bytes + 2 * head / rates.operations
        assert of_head.cost(1) == pytest.approx(expected, rel=1e-3)
        assert of_head.cost(1, 1000) == of_head.cost(1) < table.cost(1), "the head reads no keys"
        assert of_head.hash != table.hash
    whole, fused = (load_model(tiny_checkpoints["qwen3"]) for _ in range(2))
    fuse(fused)
    assert step_costs.derived(fused) == step_costs.derived(whole), "equal models have equal tables"
    small = load_model(tiny_checkpoints["qwen3"], quantize=quantizer("int8", False))
    assert step_costs.derived(small).cost(1) < step_costs.derived(whole).cost(1)
    saved = [int(step_costs.identity(model)["weight bytes"]) for model in (whole, small)]
    num_quantized = sum(each.numel() for each in whole.blocks.parameters() if each.ndim == 2)
    assert saved[0] - saved[1] > 2.5 * num_quantized, "of four bytes of each weight about one is left"
    num_packed = num_quantized + whole.head.weight.numel() if "fbgemm" in SUPPORTED_ENGINES else 0
    packed = pack(whole.half().float())  # weights that 16 bits hold
    num_bytes = int(step_costs.identity(packed)["weight bytes"])
    assert saved[0] - num_bytes == pytest.approx(2 * num_packed, rel=0.02), "a packed weight has 16 bits of 32"
    halves = [step_costs.identity(shape("qwen3-0.6b", dtype)) for dtype in (torch.bfloat16, torch.float16)]
    assert halves[0] != halves[1], "as many bytes, and another dtype"


def test_an_engine_takes_the_measured_table_and_measures_nothing(
    tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("INFER_STEP_COSTS", str(tmp_path))
    config = EngineConfig(str(tiny_checkpoints["llama"]), **NGRAM)
    engine = Engine(config)
    assert engine.runner.num_forwards == 0
    table = step_costs.derived(engine.model)
    assert engine.load().step_costs == engine.stats()["step costs"] == table.hash
    measured = StepCosts((1, 8), (1.0, 2.0), source="measured", of=step_costs.identity(engine.model))
    path = step_costs.save(measured)
    engine = Engine(config)
    assert engine.stats()["step costs"] == measured.hash != table.hash
    assert engine.scheduler.lengths.costs_of(2, 0, 3)[:3] == (1 + 1 / 7, 1 + 3 / 7, 2.0)
    assert Engine(EngineConfig(str(tiny_checkpoints["llama"]), **NGRAM | {"dtype": "bfloat16"})).stats()[
        "step costs"
    ] not in (measured.hash, table.hash)
    assert Engine(EngineConfig(str(tiny_checkpoints["llama"]))).load().step_costs is None
    path.write_text(replace(measured, of=measured.of | {"dtype": "x"}).to_json(), encoding="utf-8")
    with pytest.raises(ConfigError, match="and its name to"):
        Engine(config)
    for text in ("{", "{}", json.dumps({"tokens": [1, 2], "seconds": [2.0, 1.0]}), measured.to_json()[:-9]):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=r"cannot be used: .* Delete the file, or measure them again"):
            Engine(config)


def test_a_draft_model_has_a_table_of_its_own(tiny_checkpoints: dict[str, Path]) -> None:
    folder = str(tiny_checkpoints["llama"])
    engine = Engine(EngineConfig(folder, use_speculative_decoding=True, draft_model=folder))
    table = step_costs.derived(engine.model)
    assert engine.stats()["step costs"] == f"{table.hash}+{table.hash}"
    costs = engine.scheduler.lengths.costs_of(3, 100, 4)
    assert costs.first == table.cost(6, 100, 3) > costs.more == table.cost(3, 100) == costs.plain
    assert costs.short == table.cost(6, 100, 3) < costs.long == table.cost(15, 100, 12)


LOOKUP = SimpleNamespace(step_costs=None, num_tokens=lambda num_drafts: num_drafts + 1)


def test_what_is_asked_of_the_tables() -> None:
    """Tokens, context and drafts of three requests with four drafts each."""
    steps: Any = SimpleNamespace(cost=lambda num_tokens, context, num_drafts=0: (num_tokens, context, num_drafts))
    drafter: Any = SimpleNamespace(step_costs=steps, num_tokens=LOOKUP.num_tokens)
    asked = (3, 100, 0), (6, 100, 3), (15, 100, 12), (6, 100, 3), (3, 100, 0)
    assert tuple(TableCosts(steps, drafter)(3, 100, 4)) == asked


@pytest.mark.parametrize("name", ["tiny-llama", "llama-3.2-1b", "qwen3-8b"])
@pytest.mark.parametrize("device", ["CPU", "NVIDIA H100 80GB HBM3", "NVIDIA L4"])
@pytest.mark.parametrize("num_requests", [1, 8])
def test_useless_drafts_cost_at_most_three_percent_by_the_derived_table(
    monkeypatch: pytest.MonkeyPatch, name: str, device: str, num_requests: int
) -> None:
    """By lookup, with the model as its own draft model, and with masks, whose guesses are verified a step later."""
    rates = {"CPU": step_costs.CPU, "NVIDIA L4": step_costs.OTHER_GPU}.get(device, step_costs.RATES["H100"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: device)
    assert step_costs._rates(torch.device("cpu" if device == "CPU" else "cuda")) is rates
    monkeypatch.setattr(step_costs, "_rates", lambda device: rates)
    model = shape(name, torch.float32 if device == "CPU" else torch.bfloat16)
    table = step_costs.derived(model)
    drafting = SimpleNamespace(step_costs=table, num_tokens=LOOKUP.num_tokens)
    masks = SimpleNamespace(
        step_costs=step_costs.head_costs(model), num_tokens=lambda num_drafts: (num_drafts + 1) ** 2
    )
    for drafter, attempt_steps in ((LOOKUP, 1), (drafting, 1), (masks, 2)):
        costs: Callable[..., Any] = TableCosts(table, drafter)  # type: ignore[arg-type]
        taken, num_attempts = spent_on_useless(
            DraftLengths(3, costs_of=costs, attempt_steps=attempt_steps), 500, num_requests
        )
        assert taken <= 1.03 * 500
        assert num_attempts <= 20


def test_a_table_of_measured_steps_never_falls() -> None:
    found = {("tokens", 1): 1.0, ("tokens", 2): 0.9, ("tokens", 4): 2.0, ("context", 100): 3.0, ("drafts", 1): 1.5}
    table = table_of(found | {("drafts", 2): 2.75}, {"dtype": "float32"})
    assert table.seconds == (1.0, 1.0, 2.0)
    assert (table.key, table.wait, table.source) == (0.02, 0.675, "measured")
    assert table_of(found | {("context", 100): 0.5, ("drafts", 1): 0.1}, {}).wait == 0


def test_the_command_measures_a_table_that_engines_take(
    tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("INFER_CACHE", str(tmp_path))
    monkeypatch.delenv("INFER_STEP_COSTS")
    folder = str(tiny_checkpoints["llama"])
    asked = ["bench", "step-costs", "--model", folder, "--trials", "1", "--device", "cpu", "--threads", "1"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])["results"]
    (path,) = (tmp_path / "step-costs").iterdir()
    assert StepCosts.from_json(path.read_text(encoding="utf-8")).hash == found["hash"]
    assert found["table"]["source"] == "measured"
    assert found["table"]["tokens"][:5] == [1, 2, 4, 8, 16]
    engine = Engine(EngineConfig(folder, **NGRAM))
    assert engine.load().step_costs == found["hash"] != found["derived"]["hash"]


def test_a_made_up_step_leaves_nothing_in_the_pool(tiny_checkpoints: dict[str, Path]) -> None:
    engine = Engine(EngineConfig(str(tiny_checkpoints["llama"]), **NGRAM, spec_length=1, max_seq_len=128))
    for asked in ({}, {"num_requests": 4}, {"num_tokens": 30}, {"start": 50}, {"num_tokens": 2, "num_drafts": 1}):
        before = engine.runner.num_tokens_computed
        assert step_seconds(engine, **asked) > 0
        assert engine.runner.num_tokens_computed - before == asked.get("num_requests", 1) * asked.get("num_tokens", 1)
        assert engine.pool.audit() == []
        assert engine.pool.used_tokens == 0

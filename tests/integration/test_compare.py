"""``infer compare``: silent on a sound model, and pointing at the very module that is broken on any other."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from shared.cli import app
from shared.cli.course.compare import parse_layers
from shared.errors import ConfigError
from shared.loading.loader import load_model
from shared.models.causal_lm import CausalLM
from shared.models.norm import RMSNorm
from shared.parity.compare import Comparison, ModuleDiff, compare_models, points
from shared.parity.reference import load_reference
from shared.parity.thresholds import Distance, distance

IDS = [7, 300, 42, 42, 99, 5, 310, 211, 64, 18, 400, 3, 77, 250, 120, 33, 8, 9, 10, 11, 12, 13]
PARTS = {"llama": 11, "qwen3": 13, "gemma3_text": 16}  # points of a layer
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def references(tiny_checkpoints: dict[str, Path]) -> dict[str, Any]:
    return {family: load_reference(folder, torch.float32) for family, folder in tiny_checkpoints.items()}


def compared(
    folder: Path, reference: Any, damage: Callable[[CausalLM], None] = lambda model: None, **options: Any
) -> Comparison:
    model = load_model(folder)
    damage(model)
    return compare_models(model, reference, IDS, **options)


def infer(*arguments: str | Path) -> Any:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.mark.parametrize("family", PARTS)
def test_a_sound_model_agrees_everywhere(tiny_checkpoints: dict[str, Path], references: Any, family: str) -> None:
    comparison = compared(tiny_checkpoints[family], references[family])
    num_layers = len(comparison.drift)
    assert comparison.first_over is None
    assert len(points(family)) == PARTS[family]
    assert len(comparison.modules) == 4 + PARTS[family] * num_layers
    assert [diff.name for diff in comparison.modules if diff.layer is None] == ["embedding", "norm", "head", "logits"]
    outputs = [diff.layer for diff in comparison.modules if diff.name == points(family)[-1].name]
    assert [layer for layer in outputs if layer is not None] == list(range(num_layers))
    assert all(drift.relative < 2e-5 for drift in comparison.drift.values())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_agrees_in_every_dtype(model_folder: Path, dtype: torch.dtype) -> None:
    model, reference = load_model(model_folder, dtype=dtype), load_reference(model_folder, dtype)
    assert compare_models(model, reference, IDS).first_over is None


def norm_epsilon(module: str, value: float = 0.1) -> Callable[[CausalLM], None]:
    def damage(model: CausalLM) -> None:
        norm = model.get_submodule(module)
        assert isinstance(norm, RMSNorm)
        norm.eps = value

    return damage


def weight(module: str) -> Callable[[CausalLM], None]:
    """One weight among thousands, doubled."""

    def damage(model: CausalLM) -> None:
        parameter = model.get_submodule(module).weight
        assert isinstance(parameter, torch.Tensor)
        changed = parameter.detach().clone()
        changed.view(-1)[changed.abs().argmax()] *= 2
        model.get_submodule(module).weight = torch.nn.Parameter(changed, requires_grad=False)

    return damage


def attribute(module: str, name: str, value: Any) -> Callable[[CausalLM], None]:
    return lambda model: setattr(model.get_submodule(module), name, value)


DAMAGES: list[tuple[str, Callable[[CausalLM], None], str]] = [
    ("llama", norm_epsilon("blocks.1.attention_norm"), "layer 1, attention_norm"),
    ("llama", weight("blocks.0.attention.qkv.q_proj"), "layer 0, attention.q_proj"),
    ("llama", weight("blocks.1.attention.qkv.k_proj"), "layer 1, attention.k_proj"),
    ("llama", weight("blocks.2.mlp.gate_up.gate_proj"), "layer 2, mlp.gate_proj"),
    ("llama", weight("blocks.2.mlp.down_proj"), "layer 2, mlp.down_proj"),
    ("llama", attribute("blocks.1.attention", "scale", 0.3), "layer 1, attention.core"),
    ("llama", norm_epsilon("norm"), "norm"),
    ("qwen3", norm_epsilon("blocks.3.attention.qk.q_norm"), "layer 3, attention.qk.q_norm"),
    ("qwen3", weight("head"), "head"),
    ("qwen3", weight("embedding"), "embedding"),
    ("gemma3_text", norm_epsilon("blocks.2.attention.qk.k_norm"), "layer 2, attention.qk.k_norm"),
    ("gemma3_text", norm_epsilon("blocks.2.post_attention_norm"), "layer 2, post_attention_norm"),
    ("gemma3_text", norm_epsilon("blocks.3.post_mlp_norm"), "layer 3, post_mlp_norm"),
    ("gemma3_text", attribute("blocks.0.attention", "window", 17), "layer 0, attention.core"),
    ("gemma3_text", attribute("embedding", "scale", 8.0), "embedding"),
]


def test_not_a_number_is_over_the_limit(tiny_checkpoints: dict[str, Path], references: Any) -> None:
    damage = norm_epsilon("blocks.1.mlp_norm", float("nan"))
    comparison = compared(tiny_checkpoints["llama"], references["llama"], damage)
    assert comparison.first_over is not None
    assert comparison.first_over.path == "layer 1, mlp_norm"


@pytest.mark.parametrize(("family", "damage", "first"), DAMAGES, ids=[f"{f}: {m}" for f, _, m in DAMAGES])
def test_the_broken_module_is_marked_first(
    tiny_checkpoints: dict[str, Path], references: Any, family: str, damage: Callable[[CausalLM], None], first: str
) -> None:
    comparison = compared(tiny_checkpoints[family], references[family], damage)
    assert comparison.first_over is not None
    assert comparison.first_over.path == first
    broken = comparison.first_over.layer
    if broken is not None:  # no other layer is blamed, though all later states and the logits have changed
        assert {diff.layer for diff in comparison.modules if diff.is_over} <= {broken, None}
        assert [diff.name for diff in comparison.modules if diff.layer is None and diff.is_over] == ["logits"]
        assert comparison.drift[len(comparison.drift) - 1].relative > 2e-5
    assert all(comparison.drift[layer].relative < 2e-5 for layer in range(broken or 0))


def test_layers_can_be_chosen_and_no_hook_stays(tiny_checkpoints: dict[str, Path], references: Any) -> None:
    model, reference = load_model(tiny_checkpoints["gemma3_text"]), references["gemma3_text"]
    modules = (*model.modules(), *reference.modules())
    before = [(dict(module._forward_hooks), dict(module._forward_pre_hooks)) for module in modules]
    comparison = compare_models(model, reference, IDS, layers=[1, 3])
    assert {diff.layer for diff in comparison.modules} == {None, 1, 3}
    assert [(dict(module._forward_hooks), dict(module._forward_pre_hooks)) for module in modules] == before


def test_what_cannot_be_compared(tiny_checkpoints: dict[str, Path], references: Any) -> None:
    model = load_model(tiny_checkpoints["llama"], dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="one dtype"):
        compare_models(model, references["llama"], IDS)
    with pytest.raises(ConfigError, match="layer is 3; this model has layers 0 to 2"):
        compared(tiny_checkpoints["llama"], references["llama"], layers=[0, 3])


def test_distance() -> None:
    reference = torch.tensor([[3.0, 4.0], [0.0, 0.0], [300.0, 400.0]])
    assert distance(reference, reference) == Distance(0.0, 0.0, 0.0)
    assert distance(reference + torch.tensor([[0.0], [0.0], [1.0]]), reference).maximum == 1.0
    ours = reference.clone()
    ours[0] += 0.5  # rms 0.5 over rms 5/√2: the quiet row decides, not the loud one
    assert distance(ours, reference).relative == pytest.approx(0.5 / 12.5**0.5)
    assert distance(ours, reference).typical == pytest.approx(0.5 / 12.5**0.5 / 3**0.5)
    ours[2, 0] = float("nan")
    assert distance(ours, reference).relative != distance(ours, reference).relative
    with pytest.raises(ValueError, match="shapes differ"):
        distance(reference, reference[:2])


def test_layers_as_text() -> None:
    assert parse_layers("0, 3,8-11,3") == [0, 3, 8, 9, 10, 11]
    assert parse_layers("0-1023") == list(range(1024))
    for wrong in ("", "a", "1-", "-1", "3-1", "1,,2", "1.5", "0-99999999", "0-1024", "²"):
        with pytest.raises(ConfigError, match="layers"):
            parse_layers(wrong)


# The command.


def test_a_comparison_is_shown_by_layer_by_module_and_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's row is its first module over the limit or else its worst, and has the drift. JSON has no infinity."""
    errors: list[tuple[int | None, str, float]] = [(None, "embedding", 1e-6), (0, "norm", 2e-6), (0, "core", 1e-6)]
    errors += [(1, "norm", 2e-3), (1, "core", math.inf), (None, "logits", math.nan)]
    modules = tuple(ModuleDiff(layer, name, Distance(one, one, one), 1e-3) for layer, name, one in errors)
    drift = {layer: Distance(one, one, one) for layer, one in enumerate((3e-6, math.inf))}
    monkeypatch.setattr("shared.cli.course.compare._compare", lambda *_: Comparison(modules, drift))
    first, norm, core = "embedding 1.0e-06 1.0e-03 1.0e-06", "0 norm 2.0e-06 1.0e-03 2.0e-06", "0 core 1.0e-06 1.0e-03"
    over, last = "1 norm 2.0e-03 1.0e-03 2.0e-03", "logits nan 1.0e-03 nan over"
    for option, rows in (
        ((), [first, f"{norm} 3.0e-06", f"{over} inf <- first over", last]),
        (
            ("--full",),
            [first, norm, f"{core} 1.0e-06 3.0e-06", f"{over} <- first over", "1 core inf 1.0e-03 inf inf over", last],
        ),
    ):
        shown = infer("compare", "m", *option)
        lines = [" ".join(line.split()) for line in shown.output.splitlines()]
        assert (shown.exit_code, [line for line in lines if "1.0e-03" in line]) == (1, rows)
        assert "3 of 6 modules over their limit, first layer 1, norm." in shown.output
    found = json.loads(infer("compare", "m", "--json").stdout, parse_constant=pytest.fail)
    assert [module["relative_error"] for module in found["modules"]] == [1e-6, 2e-6, 1e-6, 2e-3, None, None]
    assert [(one["layer"], one["max_error"]) for one in found["drift"]] == [(0, 3e-6), (1, None)]


def test_the_command_on_a_sound_model(model_folder: Path) -> None:
    summary = infer("compare", model_folder, "--prompt", "Hello, world")
    assert summary.exit_code == 0, summary.output
    assert "modules agree within their limits" in summary.output
    full = infer("compare", model_folder, "--prompt", "Hello, world", "--full", "--layers", "1")
    assert all(name in full.output for name in ("mlp.gate_proj", "attention.core"))
    result = infer("compare", model_folder, "--json", "--attention-backend", "naive")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["first_over"], found["dtype"]) == (0, None, "float32")
    assert {"layer", "module", "relative_error", "max_error", "limit", "is_over"} == set(found["modules"][0])


def test_the_command_on_a_broken_copy(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference is loaded from a folder with one other weight."""
    other = Path(shutil.copytree(tiny_checkpoints["qwen3"], tmp_path / "other"))
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"][0, 0] += 1
    save_file(tensors, other / "model.safetensors")
    monkeypatch.setattr(
        "shared.parity.reference.load_reference", lambda folder, *options: load_reference(other, *options)
    )
    table = infer("compare", tiny_checkpoints["qwen3"])
    assert table.exit_code == 1
    (marked,) = [line for line in table.output.splitlines() if "<- first over" in line]
    assert marked.split()[:2] == ["2", "mlp.up_proj"]
    assert "first layer 2, mlp.up_proj" in table.output
    result = infer("compare", tiny_checkpoints["qwen3"], "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["first_over"] == {"layer": 2, "module": "mlp.up_proj"}
    assert next(m["module"] for m in found["modules"] if m["is_over"]) == "mlp.up_proj"
    assert len(found["drift"]) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "int8"], "int8"),
        (["--attention-backend", "magic"], "magic"),
        (["--layers", "0,99"], "layer is 99"),
        (["--prompt", ""], "empty"),
        (["--prompt", "word " * 4000], "tokens"),
    ],
)
def test_what_the_command_refuses(tiny_checkpoints: dict[str, Path], arguments: list[str], message: str) -> None:
    """A folder that is none is refused as by every command (test_cli)."""
    result = infer("compare", tiny_checkpoints["qwen3"], *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.demo
def test_the_demo_model_agrees(demo_folder: Path) -> None:
    result = infer("compare", demo_folder, "--prompt", "The capital of France is", "--json")
    found = json.loads(result.stdout)
    assert found["first_over"] is None
    assert len(found["drift"]) == 30

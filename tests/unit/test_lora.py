"""Gated LoRA: additions that act on chosen tokens and leave the others as they are, and the files that hold them."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.cache.view.uncached import UncachedView
from shared.checkpoints import safetensors_writer
from shared.engine.config import EngineConfig
from shared.engine.executor.graphs import CapturedStep, Computed
from shared.errors import ModelFolderError
from shared.loading.loader import load_model
from shared.loading.quantized import quantizer
from shared.models.causal_lm import CausalLM
from shared.models.fused import FusedProjection, fuse
from shared.models.norm import RMSNorm
from shared.models.packed import SUPPORTED_ENGINES, PackedProjection, pack
from shared.models.projection import Projection
from shared.models.tokens import Tokens
from shared.ops.gated import swiglu
from shared.ops.rmsnorm import rms_norm
from shared.tracks.multi_token.adapter import (
    CONFIG,
    MOST_SHOWN,
    WEIGHTS,
    Adapter,
    SamplerHead,
    load_adapter,
    with_adapter,
)
from shared.tracks.multi_token.captured_head import CapturedHead
from shared.tracks.multi_token.lora import FIRST_MASK, TARGETS, AdaptedProjection, GatedLoRA, adapt
from tests.adapters import random_adapter

IDS = torch.arange(9) * 7 % 100


@torch.inference_mode()
def hidden(model: CausalLM, gate: torch.Tensor | None = None, ids: torch.Tensor = IDS) -> torch.Tensor:
    return model(Tokens(ids, torch.arange(len(ids)), gate), UncachedView([len(ids)]))


def test_the_addition_is_the_formula() -> None:
    torch.manual_seed(0)
    lora = GatedLoRA(6, 5, rank=2, alpha=8.0)
    torch.nn.init.normal_(lora.b)
    x, y, gate = torch.randn(3, 6), torch.randn(3, 5), torch.tensor([1.0, 0.0, 0.5])
    expected = y + 4.0 * gate[:, None] * (x @ lora.a.T @ lora.b.T)
    torch.testing.assert_close(lora(y, x, gate), expected)
    assert torch.equal(lora(y, x, gate)[1], y[1])


def test_an_adapted_matrix_adds_to_the_product_of_the_normed_x() -> None:
    def parameter(*shape: int) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.randn(shape), requires_grad=False)

    torch.manual_seed(0)
    plain, norm, addition = Projection(8, 12), RMSNorm(8, 1e-6), GatedLoRA(8, 12, rank=2, alpha=3.0)
    plain.weight, norm.weight, addition.b = parameter(12, 8), parameter(8), parameter(12, 2)
    adapted = AdaptedProjection(FusedProjection([plain]), addition)
    x, gate, residual = torch.randn(5, 8), torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0]), torch.randn(5, 6)
    h = rms_norm(x, norm.weight, norm.eps)
    whole = plain.weight + 1.5 * addition.b @ addition.a
    gate_and_up = torch.where(gate[:, None] == 1, h @ whole.T, h @ plain.weight.T)
    expected = swiglu(gate_and_up[:, :6], gate_and_up[:, 6:]) + residual
    torch.testing.assert_close(adapted(x, norm, residual, gate, swiglu), expected)


@pytest.mark.parametrize("form", ["fused", "packed", "int8"])
def test_tokens_with_a_closed_gate_have_the_bits_of_the_base(model_folder: Path, form: str) -> None:
    if form == "packed" and "fbgemm" not in SUPPORTED_ENGINES:
        pytest.skip("FBGEMM is there on x86 alone")

    def make() -> CausalLM:
        model = load_model(model_folder, quantize=quantizer("int8" if form == "int8" else None, False))
        return pack(model) if form == "packed" else fuse(model)

    base, model = make(), make()
    if form == "packed" and not isinstance(base.head, PackedProjection):
        fuse(base), fuse(model)
    adapter = random_adapter(base)
    adapt(model, adapter.additions(), adapter.masks)
    gate = torch.zeros(9)
    assert torch.equal(hidden(model), hidden(base)), "without a gate"
    assert torch.equal(hidden(model, gate), hidden(base)), "all closed"
    gate[6:] = 1
    found, expected = hidden(model, gate), hidden(base)
    assert torch.equal(found[:6], expected[:6]), "no later token is seen"
    assert not torch.isclose(found[6:], expected[6:], rtol=1e-3).all(1).any()


@pytest.mark.parametrize("form", ["plain", "fused", "int8"])
def test_the_last_block_computes_the_needed_tokens(model_folder: Path, form: str) -> None:
    """Each token has its own residual and gate."""
    model = load_model(model_folder, quantize=quantizer("int8" if form == "int8" else None, False))
    if form != "plain":
        adapter = random_adapter(fuse(model))
        adapt(model, adapter.additions(), adapter.masks)
    gate = torch.tensor([0.0, 1, 1, 0, 1, 0, 0, 1, 0])
    for rows in ([8], [0], [7, 2, 4], [3, 3]):
        at = torch.tensor(rows)
        with torch.inference_mode():
            found = model(Tokens(IDS, torch.arange(9), gate), UncachedView([9]), at)
        torch.testing.assert_close(found, hidden(model, gate)[at], rtol=1e-4, atol=1e-5)


def test_every_target_matters_and_only_the_chosen_ones_are_there(tiny_checkpoints: dict[str, Path]) -> None:
    base = fuse(load_model(tiny_checkpoints["gemma3_text"]))
    expected, outputs = hidden(base), []
    for target in TARGETS:
        model = fuse(load_model(tiny_checkpoints["gemma3_text"]))
        adapter = random_adapter(base, target_modules=(target,))
        assert {name for of_layer in adapter.additions() for name in of_layer} == {target}
        outputs.append(hidden(adapt(model, adapter.additions(), adapter.masks), torch.ones(9)))
        assert not torch.isclose(outputs[-1], expected, rtol=1e-3).all()
        assert torch.equal(hidden(model, torch.zeros(9)), expected), "with all gates closed"
    assert len({tuple(output.flatten().tolist()) for output in outputs}) == len(TARGETS)


def test_mask_tokens_have_vectors_of_their_own(tiny_checkpoints: dict[str, Path]) -> None:
    model = fuse(load_model(tiny_checkpoints["gemma3_text"]))
    adapter, before = random_adapter(model), model.embedding(torch.tensor([5, 0]))
    adapter.start_masks(model.embedding)
    torch.testing.assert_close(adapter.masks[0], model.embedding(torch.arange(model.config.vocab_size)).mean(0))
    adapter.masks[1] += 1
    adapt(model, adapter.additions(), adapter.masks)
    assert torch.equal(
        model.embedding(torch.tensor([5, FIRST_MASK + 1, 0, FIRST_MASK])),
        torch.stack([before[0], adapter.masks[1], before[1], adapter.masks[0]]),
    )


@pytest.mark.parametrize("is_training", [True, False])
def test_in_the_head_a_norm_follows_each_activation(is_training: bool) -> None:
    head, previous, hidden = SamplerHead(8, 1e-6), torch.randn(3, 8), torch.randn(3, 8)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.cat((previous, hidden), dim=-1)
    for linear, norm in ((head.first, head.first_norm), (head.second, head.second_norm)):
        x = torch.nn.functional.silu(x @ linear.weight.T)
        x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm
    with torch.set_grad_enabled(is_training):
        torch.testing.assert_close(head(previous, hidden), hidden + x)


def write_in_part(path: Path, *_: Any) -> None:
    path.write_bytes(b"x")
    raise OSError("the disk is full")


def test_a_saved_adapter_is_read_back(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(tiny_checkpoints["llama"])
    adapter = random_adapter(model, rank=4, alpha=6.0, target_modules=("o_proj",), num_masks=2)
    adapter.save(tmp_path / "a", torch.float32)
    found = load_adapter(tmp_path / "a", model)
    assert found.config == adapter.config
    for name, tensor in adapter.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor)
    with monkeypatch.context() as patch:
        patch.setattr(safetensors_writer, "write_safetensors", write_in_part)
        with pytest.raises(OSError, match="full"):
            adapter.save(tmp_path / "a")
    assert torch.equal(load_adapter(tmp_path / "a", model).masks, adapter.masks), "the one before is still there"
    adapter.save(tmp_path / "a")
    assert load_adapter(tmp_path / "a", model).masks.dtype == torch.float32
    assert {path.name for path in (tmp_path / "a").iterdir()} == {CONFIG, WEIGHTS}
    assert load_adapter(tmp_path / "a", model, dtype=torch.float64).masks.dtype == torch.float64
    for length, expected in ((5, 2), (1, 1)):
        options = EngineConfig(adapter=str(tmp_path / "a"), use_speculative_decoding=True, spec_length=length)
        assert with_adapter(options).spec_length == expected, "at most as many drafts as masks"
    half = (tmp_path / "a" / "adapter.safetensors").stat().st_size
    assert half < 2 * sum(tensor.numel() for tensor in adapter.state_dict().values()) + 4096


@pytest.mark.parametrize("form", [None, "fused", "packed", "int8"])
@torch.inference_mode()
def test_guesses_are_made_of_the_first_candidates(tiny_checkpoints: dict[str, Path], form: str | None) -> None:
    model = load_model(tiny_checkpoints["llama"], quantize=quantizer("int8", True) if form == "int8" else None)
    if form is not None:
        (pack if form == "packed" else fuse)(model)
    whole, few = random_adapter(model), random_adapter(model, num_candidates=300)
    inputs = torch.tensor([5, 299]), torch.randn(2, model.config.hidden_size)
    logits = few.logits(model, *inputs)
    torch.testing.assert_close(logits[:, :300], whole.logits(model, *inputs)[:, :300])
    assert (logits[:, 300:] == -torch.inf).all()
    if form is None:
        model.head.bias = torch.nn.Parameter(torch.randn(model.config.vocab_size))
        logits = few.logits(model, *inputs)
        torch.testing.assert_close(logits[:, :300], whole.logits(model, *inputs)[:, :300])
    few.shape = replace(few.shape, logit_softcap=0.5)
    torch.testing.assert_close(few.logits(model, *inputs)[:, :300], 0.5 * torch.tanh(logits[:, :300] / 0.5))
    assert logits.shape[1] == model.config.vocab_size > 300


def test_an_adapter_that_does_not_fit_is_refused_with_the_list(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    llama, gemma = load_model(tiny_checkpoints["llama"]), load_model(tiny_checkpoints["gemma3_text"])
    folder = tmp_path / "a"
    with pytest.raises(ModelFolderError, match=r"has no adapter\.json; give the folder of an adapter"):
        load_adapter(folder, llama)
    adapter = random_adapter(llama)
    adapter.save(folder)
    with pytest.raises(
        ModelFolderError, match=r"does not fit the model:\n  .* is \[\d+, \d+\] and must be \["
    ) as error:
        load_adapter(folder, gemma)
    ours, theirs = (each.state_dict() for each in (Adapter(adapter.config, gemma.config), adapter))
    misfits = {*ours} ^ {*theirs} | {name for name in {*ours} & {*theirs} if ours[name].shape != theirs[name].shape}
    assert f"\n  and {len(misfits) - MOST_SHOWN} more\n" in str(error.value)
    assert str(error.value).count("\n  ") == MOST_SHOWN + 1
    assert "infer train mtp" in str(error.value)
    config = json.loads((folder / "adapter.json").read_text())
    for change, message in (
        ({"target_modules": ["qkv"]}, r"layers\.0\.o_proj\.a has no place in the model"),
        ({"rank": 0}, r"rank is 0; it must be an integer of at least 1"),
        ({"target_modules": ["lm_head"]}, r"names lm_head; it may name qkv, o_proj"),
    ):
        (folder / "adapter.json").write_text(json.dumps(config | change))
        with pytest.raises(ModelFolderError, match=message):
            load_adapter(folder, llama)
    (folder / "adapter.json").write_text(json.dumps(config))
    (folder / "adapter.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ModelFolderError, match="not a whole safetensors file"):
        load_adapter(folder, llama)


@torch.inference_mode()
def test_a_captured_pass_of_the_head_is_the_pass(tiny_checkpoints: dict[str, Path]) -> None:
    """A capture that runs again what it has recorded, and writes over the result: what a CUDA graph does."""
    model = fuse(load_model(tiny_checkpoints["qwen3"]))
    model.embedding.weight.mul_(100)  # so that a guess depends on the token before it
    adapter, sizes, replayed = random_adapter(model, num_candidates=300), [], []

    def capture(run: Callable[[], Computed]) -> CapturedStep:
        results = run()
        sizes.append(len(results.hidden))

        def replay() -> None:
            replayed.append(len(results.hidden))
            results.hidden.copy_(run().hidden)

        return CapturedStep(replay, results)

    head, k = CapturedHead(adapter, model, 6, capture), adapter.config.num_masks
    assert sorted(head.chains) == [1, 2, 4, 8, 16, 6 * (k + 1)]
    assert sorted(head.passes) == [1, 2, 4, 8]
    assert sizes == sorted(sizes, reverse=True), "the largest first"
    for n, is_even in product((1, 2, 3, 5, 6, 1), (False, True)):
        ids, hidden = torch.arange(n) * 7, torch.randn(n, model.config.hidden_size)
        torch.testing.assert_close(head(ids, hidden), adapter.logits(model, ids, hidden))
        assert replayed[-1] == min(size for size in (1, 2, 4, 8) if size >= n)
        counts = [k if is_even else 1 + (place + n) % k for place in range(n)]
        states = [
            torch.randn(1 + place % (k + 1), count, model.config.hidden_size) for place, count in enumerate(counts)
        ]
        drawn = [torch.arange(len(of_request)) * 7 + n for of_request in states]
        guessed = iter(head.guess(drawn, states))
        for tokens, of_request in zip(drawn, states, strict=True):
            for previous, group in zip(tokens, of_request, strict=True):
                for guess, state in zip(next(guessed), group, strict=False):
                    assert guess == adapter.logits(model, previous[None], state[None]).argmax()
                    previous = guess
    assert list(CapturedHead(adapter, model, 1, capture).passes) == [1]

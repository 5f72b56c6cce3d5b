"""Corrected rounding to 4 bits against the formula of the paper, and in a whole model."""

from pathlib import Path

import pytest
import torch
from torch.nn import Parameter

from shared.cache.view.uncached import UncachedView
from shared.checkpoints.quantize import quantize_checkpoint
from shared.errors import ConfigError
from shared.loading.loader import load_model
from shared.loading.quantized import quantizer
from shared.models.projection import Projection
from shared.models.tokens import Tokens
from shared.quantization.gptq import DAMPING, corrected, quantize_blocks
from shared.quantization.weight import dequantize, unpack_nibbles


def inputs(K: int, rows: int = 2000) -> torch.Tensor:
    """Rows whose elements depend on each other, and differ in size."""
    generator = torch.Generator().manual_seed(3)
    mixed = torch.randn(rows, K // 4, generator=generator) @ torch.randn(K // 4, K, generator=generator)
    return (mixed + torch.randn(rows, K, generator=generator)) * torch.linspace(0.2, 3, K)


def test_each_column_is_rounded_and_the_others_make_up_for_it() -> None:
    """Optimal Brain Surgeon, one column after the other, with an inverse that is made anew each time."""
    K = 160  # more columns than are corrected at once
    weight, x = torch.randn(3, K, generator=torch.Generator().manual_seed(1)), inputs(K)
    moments = x.t() @ x
    found = corrected(weight, moments, 32)
    scales = found.scales.double().repeat_interleave(32, 1)
    rest, damped = weight.double().clone(), moments.double().clone()
    damped += DAMPING * damped.diagonal().mean() * torch.eye(K)
    expected, left = torch.empty(3, K, dtype=torch.float64), moments.diagonal().argsort(descending=True)
    while len(left):
        column = left[0]
        inverse = torch.linalg.inv(damped[left][:, left])
        expected[:, column] = (rest[:, column] / scales[:, column]).round().clamp(-8, 7)
        error = rest[:, column] - expected[:, column] * scales[:, column]
        rest[:, left] -= error[:, None] * (inverse[0] / inverse[0, 0])
        left = left[1:]
    numbers = unpack_nibbles(found.values, found.run).double() - 8
    assert (numbers == expected).double().mean() > 0.99  # fp32 beside fp64 may decide a tie otherwise


@torch.inference_mode()
def test_a_block_is_corrected_for_what_the_rounded_blocks_before_it_give(
    tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the products' inputs in a model whose first blocks are rounded, which reads each sequence alone."""
    monkeypatch.setattr("shared.quantization.gptq.SEQUENCE", 40)
    model, ids = load_model(tiny_checkpoints["llama"]), torch.arange(3, 103)
    short = load_model(tiny_checkpoints["llama"], max_positions=40)  # the text is longer than what it can read
    found = dict(quantize_blocks(short, ids.tolist(), 32))
    for number, block in enumerate(model.blocks):
        seen = {name: list[torch.Tensor]() for name, module in block.named_modules() if isinstance(module, Projection)}
        for name, xs in seen.items():
            block.get_submodule(name).register_forward_pre_hook(lambda _, args, xs=xs: xs.append(args[0]))
        for part in ids.split(40):
            model(Tokens(part, torch.arange(len(part))), UncachedView([len(part)]))
        for name, xs in seen.items():
            x, module, weight = torch.cat(xs), block.get_submodule(name), found.pop(f"blocks.{number}.{name}")
            assert (corrected(module.weight, x.t() @ x, 32).values == weight.values).float().mean() > 0.995, name
            module.weight = Parameter(dequantize(weight), requires_grad=False)
    assert found == {}


def test_a_checkpoint_with_corrected_weights(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    folder, text = tiny_checkpoints["llama"], tmp_path / "text"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20, encoding="utf-8")
    ids = torch.arange(3, 60)

    @torch.inference_mode()
    def hidden(model) -> torch.Tensor:
        return model(Tokens(ids, torch.arange(len(ids))), UncachedView([len(ids)]))

    written = quantize_checkpoint(folder, tmp_path / "gptq", "gptq", text=text)
    found = hidden(load_model(written, quantize=quantizer()))
    model = load_model(folder)
    names = [name for name, _ in quantize_blocks(model, list(range(3, 200)), 32)]
    assert len(names) == 7 * model.config.num_layers
    plain = hidden(load_model(folder))
    nearest = hidden(load_model(folder, quantize=quantizer("int4")))
    assert (hidden(model) - plain).norm() < (nearest - plain).norm()
    assert not torch.equal(found, nearest)


def test_a_text_belongs_to_this_method_alone(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    for method, text in (("gptq", None), ("int4", Path("text"))):
        with pytest.raises(ConfigError, match="name a text file with --text, or leave it out"):
            quantize_checkpoint(tiny_checkpoints["llama"], tmp_path / method, method, text=text)

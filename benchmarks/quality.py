"""What rounding costs: perplexity of a text, and the distance of the logits, for each format. Introduced in phase 10.

Run as ``python -m benchmarks.quality [MODEL [TOKENS]]``; prints a Markdown table. The text is a chapter of the course.
Errors are corrected (GPTQ) on the beginnings of other chapters.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from shared.cache.uncached import UncachedView
from shared.kernels.e4m3 import dequantized, quantized
from shared.loading.loader import load_model
from shared.loading.resolve import resolve_model
from shared.models.causal_lm import CausalLM
from shared.models.projection import Projection
from shared.models.tokens import Tokens
from shared.quantization.gptq import quantize_blocks
from shared.quantization.rounding import FP8_MAX, quantize
from shared.quantization.weight import QuantizedWeight, dequantize
from shared.text.tokenizer import Tokenizer

TEXT = Path(__file__).parents[1] / "tutorial" / "phase_06.md"
READ = tuple(TEXT.with_name(f"phase_{number}.md") for number in ("02", "03", "04", "05", "07", "08"))
READ_TOKENS = 1024  # of each
BLOCK = 128
Rounding = Callable[[torch.Tensor], QuantizedWeight]


def fp8_blocks(weight: torch.Tensor) -> QuantizedWeight:
    """FP8 with a scale for 128 × 128 elements."""
    rows, columns = weight.shape
    padded = F.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK)).unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    scales = padded.abs().amax((1, 3), keepdim=True) / FP8_MAX
    values = (padded / scales).flatten(2).flatten(0, 1)[:rows, :columns].to(torch.float8_e4m3fn)
    return QuantizedWeight(values, scales.flatten(1), None, BLOCK, BLOCK)


FORMATS: dict[str, Rounding] = {
    "FP8, a scale a row": lambda weight: quantize(weight, "fp8"),
    "FP8, blocks of 128 × 128": fp8_blocks,
    "INT8, a scale a row": lambda weight: quantize(weight, "int8"),
    "INT4, groups of 32": lambda weight: quantize(weight, "int4", 32),
    "INT4, groups of 64": lambda weight: quantize(weight, "int4", 64),
    "INT4, groups of 128": lambda weight: quantize(weight, "int4", 128),
}


def corrected(group: int) -> Callable[[CausalLM, Tokenizer], None]:
    """What rounds a model's matrices to INT4 in groups of columns, and corrects their errors."""

    def correct(model: CausalLM, tokenizer: Tokenizer) -> None:
        texts = [tokenizer.encode(path.read_text(encoding="utf-8"))[:READ_TOKENS] for path in READ]
        for _ in quantize_blocks(model, [token for text in texts for token in text], group):
            pass

    return correct


CORRECTED = {f"INT4, groups of {group}, corrected (GPTQ)": corrected(group) for group in (32, 64)}


def rounded(model: CausalLM, rounding: Rounding) -> None:
    """Round the model's matrices, in fp32, apart from the head; rows that no group divides are padded."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Projection) and name != "head":
            weight = module.weight.data
            padded = F.pad(weight, (0, -weight.shape[1] % BLOCK))
            meant = dequantize(rounding(padded))[:, : weight.shape[1]]
            module.weight = torch.nn.Parameter(meant.contiguous(), requires_grad=False)


class Fp8KVView(UncachedView):
    """Keys and values as a KV cache in FP8 gives them back, with scales of 1."""

    def write(self, *about: Any) -> torch.Tensor:
        """See :class:`shared.models.tokens.KVView`."""
        q, one = super().write(*about), torch.ones(1)
        self.k, self.v = (dequantized(quantized(x, one), one, x.dtype) for x in (self.k, self.v))
        return q


@torch.inference_mode()
def log_probabilities(model: CausalLM, ids: list[int], view: type[UncachedView] = UncachedView) -> torch.Tensor:
    """fp64 ``[T, V]``."""
    tokens = Tokens(torch.tensor(ids), torch.arange(len(ids)))
    return model.logits(model(tokens, view([len(ids)]))).double().log_softmax(-1)


def main(name: str = "smollm2-135m", num_tokens: str = "1024") -> None:
    """Print the table."""
    folder = resolve_model(name)
    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.encode(TEXT.read_text(encoding="utf-8"))[: int(num_tokens)]
    expected = log_probabilities(load_model(folder), ids)
    following = torch.tensor(ids[1:])[:, None]
    print("| weights | perplexity | mean KL to fp32 | likeliest token the same |\n|---|---:|---:|---:|")
    for title in ("fp32", "fp32, KV cache in FP8", *FORMATS, *CORRECTED):
        model = load_model(folder)
        view = Fp8KVView if "KV cache" in title else UncachedView
        if title in FORMATS:
            rounded(model, FORMATS[title])
        elif title in CORRECTED:
            CORRECTED[title](model, tokenizer)
        found = log_probabilities(model, ids, view)
        perplexity = found[:-1].gather(1, following).mean().neg().exp().item()
        kl = (expected.exp() * (expected - found)).sum(-1).mean().item()
        same = (found.argmax(-1) == expected.argmax(-1)).double().mean().item()
        print(f"| {title} | {perplexity:.2f} | {kl:.4f} | {same:.1%} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:3])

"""What a block launches, in each family, phase, form of its parts and number of rows: not one kernel more."""

import importlib
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.engine.config import EngineConfig
from shared.kernels.launch import INTERPRETED, LAUNCHES
from shared.kernels.products import gemv
from shared.kernels.products.tiling import MAX_FP32_ROWS, Tiling
from shared.lessons import lessons
from shared.loading.loader import load_model
from shared.loading.quantized import quantizer
from shared.models.causal_lm import CausalLM
from shared.models.compiled import Echo
from shared.models.fused import fuse
from shared.models.tokens import Tokens
from shared.sampling.params import SamplingParams
from shared.tracks.multi_token.lora import GatedLoRA, adapt, target_sizes

PHASES = [lesson.number for lesson in lessons() if lesson.number >= "03.1" and lesson.number != "12.1"]
MANY = MAX_FP32_ROWS + 1
LAUNCHES_OF = {  # products that are ours, norms, activations, low-rank additions, by the number of rows
    "fused": {1: (4, 0, 0, 0), 16: (4, 2, 0, 0), MANY: (0, 2, 1, 0)},  # the products of many rows are PyTorch's
    "int8": {1: (4, 0, 0, 0), 16: (4, 2, 0, 0), MANY: (4, 2, 0, 0)},
    "adapted": {1: (4, 0, 0, 0), 16: (4, 2, 0, 0), MANY: (0, 2, 1, 0)},
    "adapted, with a gate": {1: (4, 2, 0, 4), 16: (4, 2, 0, 4), MANY: (0, 2, 0, 4)},
}
"""A line of a block is a launch: the addition of a residual is in a product, and the norm before it for one token."""


@pytest.fixture(autouse=True)
def large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(gemv, "tiling", lambda rows, *_: Tiling(256, 128, 4, dot=rows > 1))


def by_kind(launched: Counter[str]) -> tuple[int, ...]:
    """Products, norms, activations and low-rank additions among launches."""
    products = sum(n for name, n in launched.items() if name.startswith(("gemv", "skinny", "quantized")))
    return products, *(launched[f"{kind}_kernel"] for kind in ("rms_norm", "gated", "low_rank"))


def expected(block: Any, form: str, rows: int) -> tuple[int, ...]:
    """Gemma's norms after attention and MLP are launches of their own; the first has the norm that follows it too."""
    products, norms, activations, additions = LAUNCHES_OF[form][rows]
    if hasattr(block, "post_mlp_norm"):
        norms += 2 if norms == 0 else 1
    return products, norms, activations, additions


def attention(phase: str, rows: int) -> dict[str, int]:
    """One launch writes keys and values, and one reads them."""
    if phase < "06":
        read = ["decode_attention_kernel"] if rows == 1 else []  # prompts: PyTorch's attention
    elif phase == "06":
        read = ["paged_attention_kernel" if rows == 1 else "paged_prefill_kernel"]
    else:
        read = ["planned_decode_kernel" if rows == 1 else "planned_prefill_kernel"]
        if phase >= "09" and rows > 1:  # a step of fixed size has space for both kinds of requests
            read += ["planned_decode_kernel", "merge_states_kernel"]
    return {"kv_write_kernel": 1} | dict.fromkeys(read, 1)


@pytest.mark.skipif(not INTERPRETED, reason="a GPU's graphs launch what they recorded, and no block runs")
@pytest.mark.parametrize(
    ("family", "phase"),
    [*(("gemma3_text", phase) for phase in PHASES), *product(("llama", "qwen3"), (PHASES[0], PHASES[-1]))],
)
def test_the_launches_of_a_block_in_each_phase(family, phase, tiny_checkpoints, device):
    """Gemma's block has all that the others' have, and norms of its own."""
    engine_class = importlib.import_module(f"phases.phase_{phase.replace('.', '_')}.engine").Engine
    options = {"num_gpu_blocks": 8, "block_size": 16} if phase >= "06" else {}
    config = EngineConfig(str(tiny_checkpoints[family]), max_seq_len=64, dtype="float32", device=device.type, **options)
    engine = engine_class(config)
    block = engine.model.blocks[0]
    engine.model.blocks = engine.model.blocks[:2]  # of the last one, a prompt needs only a part
    seen = {}

    def begin(*_: Any) -> None:
        block.launched = LAUNCHES.copy()

    def end(_: Any, given: tuple[torch.Tensor, ...], __: Any) -> None:
        seen[min(len(given[0]), MANY)] = LAUNCHES - block.launched

    block.register_forward_pre_hook(begin)
    block.register_forward_hook(end)
    list(engine.generate([7] * MANY, SamplingParams(temperature=0.0, max_new_tokens=2, ignore_eos=True)))
    assert set(seen) == {1, MANY}
    for rows, launched in seen.items():
        assert by_kind(launched) == expected(block, "fused", rows), f"{rows} rows"
        memory = attention(phase, rows)
        assert {name: n for name, n in launched.items() if name in memory} == memory, f"{rows} rows"
        assert launched.total() == sum(expected(block, "fused", rows)) + sum(memory.values()), f"{rows} rows"


def with_parts(folder: Path, form: str, device: torch.device) -> CausalLM:
    quantize = quantizer("int8") if form == "int8" else None
    model = load_model(folder, dtype=torch.float32, device=device, max_positions=32, quantize=quantize)
    model.blocks = model.blocks[:1]
    fuse(model)
    if form.startswith("adapted"):
        additions = {
            name: GatedLoRA(*size, rank=4, alpha=8.0).requires_grad_(False).to(device)
            for name, size in target_sizes(model.config).items()
        }
        adapt(model, [additions], torch.zeros(1, model.config.hidden_size, device=device))
    return model


@pytest.mark.parametrize("form", LAUNCHES_OF)
def test_the_launches_of_a_block_with_other_parts(form, model_folder, device):
    model = with_parts(model_folder, form, device)
    block = model.blocks[0]
    for rows in LAUNCHES_OF[form]:
        x, ids = torch.zeros(rows, model.config.hidden_size, device=device), torch.arange(rows, device=device)
        gate = torch.ones(rows, device=device) if form.endswith("gate") else None
        before = LAUNCHES.copy()
        with torch.inference_mode():
            block(x, Tokens(ids, ids, gate), Echo())
        launched = LAUNCHES - before
        assert by_kind(launched) == expected(block, form, rows), f"{rows} rows"
        assert launched.total() == sum(by_kind(launched)), f"{rows} rows"

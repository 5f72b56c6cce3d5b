"""Phase 3.1 generates the same tokens as phase 3 and transformers on any device, and refuses unsupported machines."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from phases.phase_03.engine import Engine as Unfused
from phases.phase_03_1.engine import Engine
from shared.cache.view.contiguous import ContiguousCache, ContiguousView
from shared.cache.view.fused_contiguous import FusedContiguousView
from shared.checkpoints.make import make_checkpoint
from shared.engine.config import EngineConfig
from shared.errors import ConfigError
from shared.kernels.gluon import HAS_GLUON
from shared.kernels.launch import LAUNCHES, generation
from shared.kernels.products.gated_gemm import gated_gemm_kernel
from shared.loading import placement
from shared.loading.loader import load_model
from shared.models.causal_lm import CausalLM
from shared.models.fused import fuse
from shared.models.tokens import Tokens
from shared.parity.thresholds import PEER_FACTOR, THRESHOLDS, argmax_shortfall, distance
from shared.sampling.params import SamplingParams
from tests.as_transformers import ASKED_OF_DEMO, assert_generated
from tests.mixed_requests import SENTENCE
from tests.reference_tokens import ReferenceTokens

PROMPTS = ["The capital of France is", "x", SENTENCE]
DEV_SHAPES = ["llama-3.2-1b", "qwen3-1.7b", "gemma-3-1b"]
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.2, "seed": 11}


def ids(engine: Any, prompt: str | list[int], num_tokens: int, **params: object) -> list[int]:
    settings: dict = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": num_tokens} | params
    return [output.token_id for output in engine.generate(prompt, SamplingParams(**settings))]


@torch.inference_mode()
def forced_logits(
    model: CausalLM, view: ContiguousView | FusedContiguousView, token_ids: Sequence[int], prompt: int
) -> torch.Tensor:
    """Logits ``[n, V]`` in fp32 after the prompt and after each of the given tokens, one per step."""
    logits = []
    for step in [list(token_ids[:prompt]), *([token_id] for token_id in token_ids[prompt:])]:
        start = view.cache.length
        positions = torch.arange(start, start + len(step), device=model.device)
        view.prepare(len(step))
        hidden = model(Tokens(torch.tensor(step, device=model.device), positions), view)
        view.cache.advance(len(step))
        logits.append(model.logits(hidden[-1:]).float())
    return torch.cat(logits)


def test_greedy_tokens_equal_those_of_transformers(model_folder: Path, reference_tokens: ReferenceTokens) -> None:
    engine = Engine(EngineConfig(model=str(model_folder)))
    assert_generated(engine, reference_tokens, model_folder, [(PROMPTS[0], 100), (PROMPTS[1], 30), (PROMPTS[2], 30)])


def test_sampled_tokens_equal_those_of_phase_3(model_folder: Path) -> None:
    config = EngineConfig(model=str(model_folder))
    assert ids(Engine(config), PROMPTS[0], 40, **SAMPLED) == ids(Unfused(config), PROMPTS[0], 40, **SAMPLED)


@pytest.mark.demo
def test_greedy_tokens_of_the_demo_model_equal_those_of_transformers(
    demo_folder: Path, reference_tokens: ReferenceTokens
) -> None:
    engine = Engine(EngineConfig(model=str(demo_folder), max_seq_len=256))
    assert_generated(engine, reference_tokens, demo_folder, ASKED_OF_DEMO)


def test_a_model_that_the_gpu_cannot_hold_is_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3_000_000_000, 80_000_000_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 500_000_000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100_000_000)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    gpu = torch.device("cuda", 0)
    placement.check_memory(3_400_000_000, gpu, "The model")
    placement.check_memory(10**15, torch.device("cpu"), "The model")
    with pytest.raises(ConfigError, match=r"The model takes 3\.41 GB and A GPU has 3\.40 of 80\.00 GB free; choose"):
        placement.check_memory(3_410_000_000, gpu, "The model")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["naive", "sdpa", "flash"])
def test_tokens_on_the_gpu_equal_those_of_the_cpu(model_folder: Path, backend: str) -> None:
    on_cpu = Unfused(EngineConfig(model=str(model_folder)))
    on_gpu = Engine(EngineConfig(model=str(model_folder), device="cuda", dtype="float32", attention_backend=backend))
    for prompt in PROMPTS:
        assert ids(on_gpu, prompt, 100) == ids(on_cpu, prompt, 100), prompt
    assert ids(on_gpu, PROMPTS[0], 60, **SAMPLED) == ids(on_cpu, PROMPTS[0], 60, **SAMPLED)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", DEV_SHAPES)
def test_tokens_of_a_real_shape_equal_those_of_phase_3(shape: str, tmp_path: Path) -> None:
    folder = make_checkpoint(shape, tmp_path / "model", device="cuda")
    config = EngineConfig(model=str(folder), device="cuda", dtype="float32", max_seq_len=1024)
    prompt = list(range(7, 607))  # longer than Gemma's window
    expected = ids(Unfused(config), prompt, 32)
    torch.cuda.empty_cache()
    assert ids(Engine(config), prompt, 32) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", DEV_SHAPES)
def test_logits_of_a_real_shape_are_within_the_thresholds(shape: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """The tokens are given, so that a flip between near-ties does not make the sequences diverge."""
    folder = make_checkpoint(shape, tmp_path / "model", device="cuda", dtype=str(dtype).removeprefix("torch."))
    num_prompt, length = 2048, 2128  # a prompt for which a Hopper GPU computes gate and up in one launch
    token_ids = torch.randint(0, 50000, (length - 20,), generator=torch.Generator().manual_seed(1)).tolist()

    def logits(weights: torch.dtype, is_fused: bool) -> torch.Tensor:
        model = load_model(folder, dtype=weights, device="cuda", max_positions=length)
        cache = ContiguousCache(model.config, length, weights, "cuda")
        if is_fused:
            view: ContiguousView | FusedContiguousView = FusedContiguousView(cache, model.config.num_heads)
            model = fuse(model)
        else:
            view = ContiguousView(cache)
        return forced_logits(model, view, token_ids, prompt=num_prompt).cpu()

    truth = logits(torch.float32, is_fused=False)
    before = LAUNCHES[gated_gemm_kernel.__name__]
    ours, plain = logits(dtype, is_fused=True), logits(dtype, is_fused=False)
    if HAS_GLUON and generation(torch.device("cuda")).has_warpgroups:
        assert LAUNCHES[gated_gemm_kernel.__name__] - before > 1, "one compiles it, and the prompt takes it"
    threshold = THRESHOLDS[dtype]
    error, peer = distance(ours, truth).typical, distance(plain, truth).typical
    flips = int((ours.argmax(-1) != truth.argmax(-1)).sum())
    print(f"{shape} {dtype}: error {error:.2e}, phase 3 {peer:.2e}, flips {flips} of {len(truth)}")
    assert error <= max(threshold.logits, PEER_FACTOR * peer)
    assert argmax_shortfall(ours, truth).max() <= max(
        threshold.argmax, PEER_FACTOR * argmax_shortfall(plain, truth).max().item()
    )

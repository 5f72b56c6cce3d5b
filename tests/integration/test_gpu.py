"""The phases on a GPU: checkpoints made there, loading onto it, and equal output with the CPU and with transformers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.timing import run
from phases.phase_02.engine import Engine as Uncached
from phases.phase_03.engine import Engine
from shared.cache.view.uncached import UncachedView
from shared.checkpoints.make import make_checkpoint
from shared.engine.config import EngineConfig
from shared.loading.loader import load_model
from shared.models.tokens import Tokens
from shared.ops.attention import naive_attention, sdpa_attention
from shared.parity.reference import load_reference
from shared.parity.thresholds import PEER_FACTOR, THRESHOLDS, argmax_shortfall, distance
from shared.sampling.params import SamplingParams

pytestmark = pytest.mark.gpu
PROMPT = list(range(5, 45))


@pytest.fixture(autouse=True)
def exact_fp32() -> Iterator[None]:
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = tf32


@pytest.mark.parametrize("backend", ["naive", "sdpa"])
def test_greedy_tokens_equal_those_of_the_cpu(model_folder: Path, backend: str) -> None:
    expected = run(Engine(EngineConfig(model=str(model_folder))), PROMPT, 100).token_ids
    config = EngineConfig(model=str(model_folder), device="cuda", dtype="float32", attention_backend=backend)
    assert run(Engine(config), PROMPT, 100).token_ids == expected
    assert run(Uncached(config), PROMPT, 40).token_ids == expected[:40]


def test_sampled_tokens_equal_those_of_the_cpu(model_folder: Path) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.9, top_k=50, seed=3, max_new_tokens=60, ignore_eos=True)
    answers = [
        [
            o.token_id
            for o in Engine(EngineConfig(model=str(model_folder), device=d, dtype="float32")).generate("x", params)
        ]
        for d in ("cpu", "cuda")
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_logits_are_within_the_thresholds(model_folder: Path, dtype: torch.dtype) -> None:
    ids = torch.tensor(PROMPT)
    truth = load_reference(model_folder, torch.float32, round_to=dtype)
    model = load_model(model_folder, dtype=dtype, device="cuda")
    with torch.inference_mode():
        expected = truth(ids[None]).logits[0]
        tokens = Tokens(ids.cuda(), torch.arange(len(ids), device="cuda"))
        logits = model.logits(model(tokens, UncachedView([len(ids)]))).cpu()
        peer = load_reference(model_folder, dtype)(ids[None]).logits[0]
    threshold = THRESHOLDS[dtype]
    ours, theirs = distance(logits, expected).typical, distance(peer, expected).typical
    assert ours <= max(threshold.logits, PEER_FACTOR * theirs)
    assert argmax_shortfall(logits, expected).max() <= threshold.argmax


def test_the_checkpoints_own_dtype_is_the_default(tmp_path: Path) -> None:
    folder = make_checkpoint("tiny-qwen3", tmp_path / "model", dtype="bfloat16")
    model = load_model(folder, device="cuda")
    assert {(p.dtype, p.device.type) for p in model.parameters()} == {(torch.bfloat16, "cuda")}


def test_a_real_shape_is_made_on_the_gpu_and_runs(tmp_path: Path) -> None:
    folder = make_checkpoint("llama-3.2-1b", tmp_path / "model", device="cuda")
    again = make_checkpoint("llama-3.2-1b", tmp_path / "again", device="cuda")
    assert (folder / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    config = EngineConfig(model=str(folder), device="cuda", max_seq_len=256)
    engine = Engine(config)
    assert engine.model.dtype == torch.bfloat16
    assert len(run(engine, PROMPT, 32).token_ids) == 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("num_new", "num_keys"), [(1, 1), (1, 700), (2, 2), (300, 300), (300, 700)])
@pytest.mark.parametrize("window", [None, 128, 512])
def test_pytorchs_attention_is_the_formula(dtype, head_dim: int, num_new: int, num_keys: int, window) -> None:
    """Whole prompts, prompts with a history and single tokens take different kernels of PyTorch's."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(shape, generator=generator, device="cuda").to(dtype)
        for shape in ((num_new, 8, head_dim), (2, num_keys, head_dim), (2, num_keys, head_dim))
    )
    settings = {"scale": head_dim**-0.5, "window": window}
    truth = naive_attention(q.double(), k.double(), v.double(), **settings)
    error = (sdpa_attention(q, k, v, **settings).double() - truth).abs().max()
    assert error <= {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}[dtype]

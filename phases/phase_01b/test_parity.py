"""Logits against transformers: every family and variant on tiny random checkpoints, and the demo model's weights."""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from safetensors.torch import save_file

from phases.phase_01b.engine import Engine
from shared.cache.view.uncached import UncachedView
from shared.checkpoints.byte_tokenizer import save_byte_tokenizer
from shared.checkpoints.make import checkpoint_tensors, random_tensor
from shared.checkpoints.shapes import SHAPES
from shared.errors import RequestError
from shared.loading.loader import load_model
from shared.models.tokens import Tokens
from shared.parity.reference import load_reference
from shared.parity.thresholds import THRESHOLDS, allowed_error, argmax_shortfall, distance
from tests.comparison import assert_equal, assert_rows_close
from tests.reference_tokens import kept

BACKENDS = ("naive", "sdpa")
HALF = (torch.bfloat16, torch.float16)
IDS = torch.randint(0, 512, (48,), generator=torch.Generator().manual_seed(0)).tolist()
LINEAR = {"rope_type": "linear", "factor": 8.0}
YARN = {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 16, "beta_fast": 4, "beta_slow": 0.1}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("tiny-llama", {}),  # tied, RoPE scaled as in Llama 3
    "llama-untied-biases": (
        "tiny-llama",
        {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True, "rope_scaling": None},
    ),
    "llama-unscaled": ("tiny-llama", {"rope_scaling": None}),
    "llama-untied": ("tiny-llama", {"rope_scaling": None, "tie_word_embeddings": False}),
    "llama-linear": ("tiny-llama", {"rope_scaling": LINEAR}),
    "llama-yarn": ("tiny-llama", {"rope_scaling": YARN}),  # three times as many positions as the original 16
    "qwen3-yarn": ("tiny-qwen3", {"rope_scaling": YARN | {"attention_factor": 1.4}}),
    "gemma3-yarn": ("tiny-gemma3", {"rope_scaling": YARN | {"mscale": 2.0, "mscale_all_dim": 0.5}}),
    "qwen3": ("tiny-qwen3", {}),  # untied
    "qwen3-tied-biases": ("tiny-qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3-sliding": ("tiny-qwen3", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
    "gemma3": ("tiny-gemma3", {}),  # tied
    "gemma3-untied-biases": ("tiny-gemma3", {"tie_word_embeddings": False, "attention_bias": True}),
    "gemma3-softcap": ("tiny-gemma3", {"final_logit_softcapping": 2.5}),
    "gemma3-linear": ("tiny-gemma3", {"rope_scaling": LINEAR}),  # like the larger Gemmas, on full layers only
}


def write_checkpoint(folder: Path, shape: str, changes: dict[str, Any]) -> Path:
    """A random checkpoint of a shape with some of its settings changed, biases included."""
    config = SHAPES[shape] | changes
    shapes = dict(checkpoint_tensors(config))
    tensors = {name: random_tensor(name, s, family=config["model_type"]) for name, s in shapes.items()}
    generator = torch.Generator().manual_seed(1)
    for part, setting in (("self_attn", "attention_bias"), ("mlp", "mlp_bias")):
        for name in shapes if config.get(setting) else ():
            if f".{part}." in name and name.endswith("_proj.weight"):
                bias = torch.randn(shapes[name][0], generator=generator)
                tensors[name.replace(".weight", ".bias")] = 0.5 * bias
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    save_byte_tokenizer(config, folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def variants(session_folder: Path) -> Callable[[str], Path]:
    """The checkpoint of a variant, which the processes of a run share."""

    @functools.cache
    def of(name: str) -> Path:
        folder = session_folder / "variants" / name
        with FileLock(session_folder / f"variant-{name}.lock"):
            return folder if folder.exists() else write_checkpoint(folder, *VARIANTS[name])

    return of


@torch.inference_mode()
def expected_logits(
    folder: Path, ids: list[int], dtype: torch.dtype, backend: str = "naive", round_to: torch.dtype | None = None
) -> torch.Tensor:
    """transformers' logits ``[T, V]``."""
    return load_reference(folder, dtype, backend, round_to)(torch.tensor([ids]), use_cache=False).logits[0]


def check_half(folder: Path, ids: list[int], dtype: torch.dtype) -> None:
    """Compare ours and transformers' in ``dtype`` by their distances from fp32 on the same rounded weights."""
    truth, threshold = expected_logits(folder, ids, torch.float32, round_to=dtype), THRESHOLDS[dtype]
    for backend in BACKENDS:
        ours = Engine(str(folder), dtype=dtype, attention_backend=backend).forward(ids)
        peer = distance(expected_logits(folder, ids, dtype, backend), truth).typical
        assert ours.dtype == dtype
        assert distance(ours, truth).typical <= allowed_error(threshold.logits, peer), backend
        assert argmax_shortfall(ours, truth).max() <= threshold.argmax, backend


@pytest.mark.from_empty("llama-unscaled-naive", "llama-untied-naive")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_fp32(variants: Callable[[str], Path], variant: str, backend: str) -> None:
    folder = variants(variant)
    ours = Engine(str(folder), attention_backend=backend).forward(IDS)
    expected = kept(folder / f"expected-{backend}", lambda: expected_logits(folder, IDS, torch.float32, backend))
    assert_equal(ours.dtype, torch.float32, "dtype of the logits")
    assert_rows_close(ours, expected, THRESHOLDS[torch.float32].logits, "logits", ("token", "vocabulary"))
    assert_equal(ours.argmax(-1), expected.argmax(-1), "most likely token", ("token",))


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("variant", ["llama", "qwen3", "gemma3", "gemma3-softcap"])
def test_half_precision(variants: Callable[[str], Path], variant: str, dtype: torch.dtype) -> None:
    check_half(variants(variant), IDS, dtype)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_setting_of_a_variant_matters(variants: Callable[[str], Path], variant: str, tmp_path: Path) -> None:
    """Without the changed settings, the same weights give different logits, so the tests above depend on the
    settings."""
    shape, changes = VARIANTS[variant]
    folder = variants(variant)
    ours = Engine(str(folder)).forward(IDS)
    for setting in changes.keys() - {"tie_word_embeddings", "attention_bias", "mlp_bias", "max_window_layers"}:
        config = SHAPES[shape] | changes | {setting: SHAPES[shape][setting]}
        if setting == "sliding_window":
            config["sliding_window"] = changes["sliding_window"] + 1
        other = tmp_path / setting
        other.mkdir()
        (other / "config.json").write_text(json.dumps(config))
        for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
            (other / name).hardlink_to(folder / name)
        error = distance(Engine(str(other)).forward(IDS), ours).relative
        assert error > 10 * THRESHOLDS[torch.float32].logits, setting


def test_attention_softcap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers reads Gemma 3's ``attn_logit_softcapping`` and passes it to no attention: no released Gemma 3 sets
    it. It has the formula as an argument of the eager attention, and ours is compared with that."""
    from transformers.models.gemma3 import modeling_gemma3

    capped = write_checkpoint(tmp_path / "capped", "tiny-gemma3", {"attn_logit_softcapping": 0.5})
    plain = write_checkpoint(tmp_path / "plain", "tiny-gemma3", {})
    ignored = torch.equal(*(expected_logits(folder, IDS, torch.float32) for folder in (capped, plain)))
    if ignored:
        formula = functools.partial(modeling_gemma3.eager_attention_forward, softcap=0.5)
        monkeypatch.setattr(modeling_gemma3, "eager_attention_forward", formula)
    expected = expected_logits(capped, IDS, torch.float32)
    uncapped = Engine(str(plain)).forward(IDS)
    assert distance(uncapped, expected).relative > 100 * THRESHOLDS[torch.float32].logits
    for backend in BACKENDS:
        ours = Engine(str(capped), attention_backend=backend).forward(IDS)
        assert distance(ours, expected).relative <= THRESHOLDS[torch.float32].logits


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_ragged_batch_gives_each_sequence_its_own_logits(model_folder: Path, backend: str) -> None:
    """Lengths below, at and above Gemma's window of 16, one of a single token."""
    model = load_model(model_folder)
    sequences = [IDS[:5], IDS[5:6], IDS[6:22], IDS[22:48]]
    ids = [token for sequence in sequences for token in sequence]
    positions = torch.cat([torch.arange(len(sequence)) for sequence in sequences])
    with torch.inference_mode():
        view = UncachedView([len(sequence) for sequence in sequences], backend)
        tokens, last = Tokens(torch.tensor(ids), positions), torch.tensor([4, 5, 21, 47])
        together = model.logits(model(tokens, view))
        ends = model.logits(model(tokens, view, rows=last))
    alone = torch.cat([Engine(str(model_folder), attention_backend=backend).forward(s) for s in sequences])
    assert_rows_close(
        together,
        alone,
        THRESHOLDS[torch.float32].logits,
        "logits of a step with sequences of 5, 1, 16 and 26 tokens",
        ("token", "vocabulary"),
    )
    assert_equal(together.argmax(-1), alone.argmax(-1), "most likely token", ("token",))
    most, axes = THRESHOLDS[torch.float32].logits, ("sequence", "vocabulary")
    assert_rows_close(ends, alone[last], most, "logits of the last tokens alone, which rows names", axes)


@pytest.mark.from_empty("llama")
def test_a_prompt_reads_no_later_token(model_folder: Path) -> None:
    engine = Engine(str(model_folder))
    whole, part = engine.forward(IDS), engine.forward(IDS[:20])
    assert_rows_close(
        part,
        whole[:20],
        THRESHOLDS[torch.float32].logits,
        "logits without the 28 tokens after them",
        ("token", "vocabulary"),
    )


@pytest.mark.parametrize("ids", [[], [512], [-1], [True], [1.0], [0] * 2048], ids=lambda ids: f"{ids[:1]}x{len(ids)}")
def test_prompts_that_are_refused(folder: Path, ids: list[Any]) -> None:
    with pytest.raises(RequestError):
        Engine(str(folder)).forward(ids)


# The demo model.

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return",
    "Water boils at a temperature of",
    "Once upon a time, in a village by the sea, there lived",
    "Les élèves ont lu un livre de Jules",
)


@dataclass(frozen=True)
class Demo:
    """The demo model on both sides, in fp32."""

    engine: Engine
    reference: Any
    tokenizer: Any

    @torch.inference_mode()
    def expected(self, prompt: str) -> tuple[list[int], torch.Tensor]:
        ids = self.tokenizer(prompt)["input_ids"]
        return ids, self.reference(torch.tensor([ids]), use_cache=False).logits[0]


@pytest.fixture(scope="module")
def demo_tokenizer(demo_folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_folder, local_files_only=True)


@pytest.fixture(scope="module")
def demo(demo_folder: Path, demo_tokenizer: Any) -> Demo:
    return Demo(Engine(str(demo_folder)), load_reference(demo_folder, torch.float32), demo_tokenizer)


@pytest.mark.demo
def test_demo_in_bf16(demo_folder: Path, demo_tokenizer: Any) -> None:
    """Runs first: its models are freed before the other tests of the demo model load theirs."""
    check_half(demo_folder, demo_tokenizer(" ".join(PROMPTS))["input_ids"], torch.bfloat16)


@pytest.mark.from_empty
@pytest.mark.demo
@pytest.mark.parametrize("prompt", PROMPTS)
def test_demo_logits_at_every_position(demo: Demo, prompt: str) -> None:
    ids, expected = demo.expected(prompt)
    ours = demo.engine.forward(ids)
    error, bound = distance(ours, expected), THRESHOLDS[torch.float32].logits
    assert ours.shape == (len(ids), 49152)
    assert_rows_close(ours, expected, bound, "logits", ("token", "vocabulary"))
    assert error.maximum <= 1e-3
    assert_equal(ours.argmax(-1), expected.argmax(-1), "most likely token", ("token",))


@pytest.mark.demo
@pytest.mark.parametrize("prompt", PROMPTS)
def test_demo_from_text_to_the_top_five(demo: Demo, prompt: str) -> None:
    _, expected = demo.expected(prompt)
    best = expected[-1].softmax(-1).topk(5)
    texts, probabilities = zip(*demo.engine.top_tokens(prompt), strict=True)
    assert list(texts) == [demo.tokenizer.decode([i]) for i in best.indices.tolist()]
    assert list(probabilities) == pytest.approx(best.values.tolist(), rel=1e-4)


@pytest.mark.from_empty
@pytest.mark.demo
def test_demo_knows_the_capital_of_france(demo: Demo) -> None:
    assert demo.engine.top_tokens("The capital of France is", 1)[0][0] == " Paris"

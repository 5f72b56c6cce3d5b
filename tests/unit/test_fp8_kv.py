"""A KV cache in 8 bits under an engine: the same answers however requests are scheduled, and twice the tokens."""

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import shared.cache.pool_size as pool_size
from phases.phase_09.engine import SUPPORTED as SUPPORTED_BEFORE
from phases.phase_10.engine import Engine
from shared.cache.layout.paged import PagedSizes
from shared.cache.paged_memory import PagedMemory
from shared.cache.pool.paged import PagedKVCachePool
from shared.cache.view.block_storage import PlainStorage
from shared.cache.view.contiguous import kv_bytes
from shared.cache.view.fp8_storage import Fp8Storage
from shared.cache.view.storages import STORAGES
from shared.checkpoints.quantize import quantize_checkpoint
from shared.engine.batch import Batch
from shared.engine.config import KV_CACHE_DTYPES, EngineConfig
from shared.errors import ConfigError, ModelFolderError
from shared.kernels.e4m3 import dequantized, quantized
from shared.loading.checkpoint import Checkpoint
from shared.loading.config_json import read_config
from shared.loading.kv_scales import kv_scales
from shared.loading.loader import load_model
from shared.models.causal_lm import CausalLM
from shared.ops.attention import ATTENTION_BACKENDS
from shared.text.tokenizer import Tokenizer
from shared.tracks.ranks.shard import Shard
from tests.mixed_requests import ALIKE, ARRIVALS, LONG, MIXED, Requests, serve, tokens
from tests.steps import make_request, step_of
from tests.views import paged_view

FP8: dict[str, Any] = {"kv_cache_dtype": "fp8"}


def make(folder: Path, **settings: Any) -> Engine:
    return Engine(EngineConfig(model=str(folder), seed=7, **settings))


def test_earlier_phases_refuse_it_and_name_the_phase() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype = 'fp8' arrives in phase 10; leave it at 'auto'"):
        EngineConfig(**FP8).check(SUPPORTED_BEFORE)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype is 'fp8' and kv_cache_backend is 'contiguous'"):
        EngineConfig(kv_cache_backend="contiguous", **FP8)


def test_the_names_of_storages_are_those_of_the_table() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype is 'fp9'; it must be one of auto, fp8"):
        EngineConfig(kv_cache_dtype="fp9")
    assert list(STORAGES) == KV_CACHE_DTYPES


class Int8Storage:
    """Keys and values in whole steps of a constant, for PyTorch's operations."""

    STEP = 1 / 16

    def __init__(self, config: EngineConfig, model: CausalLM, sizes: PagedSizes) -> None:
        self.dtype, self.blocks = model.dtype, PlainStorage(model.config, sizes, torch.int8)
        self.keys, self.values, self.num_bytes = self.blocks.keys, self.blocks.values, self.blocks.num_bytes
        self.copy, self.make_readable = self.blocks.copy, self.blocks.make_readable
        self.layer_keys, self.layer_values = self.blocks.layer_keys, self.blocks.layer_values
        self.arguments = self.blocks.arguments

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        k, v = ((new / self.STEP).round().clamp(-127, 127).to(torch.int8) for new in (k, v))
        self.blocks.write(layer, k, v, slots)

    def read(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = self.blocks.read(layer, blocks)
        return k.to(self.dtype) * self.STEP, v.to(self.dtype) * self.STEP


def test_a_storage_is_a_class_and_a_row_of_the_table(
    tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setitem(STORAGES, "int8", Int8Storage)
    KV_CACHE_DTYPES.append("int8")
    request.addfinalizer(lambda: KV_CACHE_DTYPES.remove("int8"))
    folder, options = tiny_checkpoints["llama"], {"kv_cache_dtype": "int8", "max_seq_len": 128}
    arrivals = (ARRIVALS * 3)[: len(ALIKE)]

    def answers() -> list[list[int | None]]:
        engine = make(folder, prefill_chunk_size=16, block_size=4, **options)
        assert engine.view.keys.dtype == torch.int8
        return [tokens(outputs) for outputs in serve(engine, ALIKE, arrivals)[0]]

    alone = make(folder, use_prefix_caching=False, use_chunked_prefill=False, max_batch_size=1, **options)
    assert answers() == [tokens(serve(alone, [request], [0])[0][0]) for request in ALIKE]
    fine = answers()
    monkeypatch.setattr(Int8Storage, "STEP", 1e6)  # everything is rounded to nothing
    assert answers() != fine, "the storage is not read"


@pytest.mark.parametrize(
    ("family", "requests"),
    [("llama", LONG), ("llama", ALIKE), ("qwen3", MIXED), ("gemma3_text", ALIKE)],
    ids=["llama-long", "llama-alike", "qwen3-mixed", "gemma3-alike"],
)
def test_answers_depend_on_no_other_request(tiny_checkpoints: dict[str, Path], family: str, requests: Requests) -> None:
    """Not on chunks, shared prefixes, preemption, overlap, or the order of arrival."""
    folder, options = tiny_checkpoints[family], FP8 | {"max_seq_len": 640 if requests is LONG else 128}
    alone = make(folder, use_prefix_caching=False, use_chunked_prefill=False, max_batch_size=1, **options)
    expected = [tokens(serve(alone, [request], [0])[0][0]) for request in requests]
    small = {"num_gpu_blocks": 220 if requests is LONG else 43, "block_size": 3, "prefill_chunk_size": 16}
    engine = make(folder, overlap_scheduling=True, **small, **options)
    arrivals = (ARRIVALS * 3)[: len(requests)]
    for _ in range(2):  # the second time with prefixes in the cache
        assert [tokens(outputs) for outputs in serve(engine, requests, arrivals)[0]] == expected
    assert engine.scheduler.num_prefix_hits > 0
    assert engine.load().num_preemptions > 0 or requests is LONG
    assert engine.view.keys.dtype == torch.uint8


@pytest.mark.parametrize(("dtype", "times"), [("bfloat16", 2), ("float32", 4)])
def test_the_same_bytes_hold_more_tokens(
    tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, dtype: str, times: int
) -> None:
    config = read_config(tiny_checkpoints["llama"])
    monkeypatch.setattr(pool_size, "step_bytes", lambda *options: 0)
    monkeypatch.setattr(pool_size, "free_bytes", lambda device: 200 * kv_bytes(config, 16, torch.float32))
    options: dict[str, Any] = {"dtype": dtype, "max_seq_len": 512, "max_batch_size": 1000}
    engines = [make(tiny_checkpoints["llama"], **options, **settings) for settings in ({}, FP8)]
    wide, narrow = (engine.stats() for engine in engines)
    assert narrow["cache capacity (tokens)"] == wide["cache capacity (tokens)"] * times
    assert narrow["cache bytes"] == wide["cache bytes"] == engines[1].view.keys.nbytes * 2
    free = [engine.pool.free_tokens for engine in engines]
    assert free[1] == free[0] * times, "admission counts the smaller blocks"


def with_scales(folder: Path, source: Path, scales: dict[str, torch.Tensor]) -> Path:
    """A copy of a checkpoint that carries scales besides."""
    shutil.copytree(source, folder)
    save_file(load_file(folder / "model.safetensors") | scales, folder / "model.safetensors")
    return folder


FORMS = {  # of a layer's names: compressed-tensors, an earlier form of it, ModelOpt
    "compressed-tensors": "model.layers.{}.self_attn.{}_scale",
    "earlier": "model.layers.{}.self_attn.{}_proj.output_scale",
    "modelopt": "model.layers.{0}.self_attn.{1}_proj.{1}_scale",
}


@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoints_own_scales_are_used(tiny_checkpoints: dict[str, Path], tmp_path: Path, form: str) -> None:
    source = tiny_checkpoints["llama"]
    config = read_config(source)
    if form == "compressed-tensors":  # as most checkpoints with scales
        source = quantize_checkpoint(source, tmp_path / "int8", "int8")
    expected = 0.01 + 0.1 * torch.rand(2, config.num_layers, config.num_kv_heads)
    if form == "modelopt":  # a number a layer
        expected = expected[..., :1].expand_as(expected).contiguous()
    scales = {
        FORMS[form].format(layer, kind): expected[n, layer, : 1 if form == "modelopt" else None].clone()
        for n, kind in enumerate("kv")
        for layer in range(config.num_layers)
    }
    others = FORMS[form].format(config.num_layers, "k"), "model.layers.0.self_attn.prob_scale"
    folder = with_scales(tmp_path / "scaled", source, scales | {name: torch.tensor(9.0) for name in others})
    view = make(folder, max_seq_len=64, **FP8).view
    actual = [[by_layer[name] for by_layer in view.storage.arguments] for name in ("k_scales", "v_scales")]
    assert torch.equal(torch.stack([torch.stack(layers) for layers in actual]), expected)
    assert tokens(serve(make(folder, max_seq_len=64), MIXED[:1], [0])[0][0]) == tokens(
        serve(make(source, max_seq_len=64), MIXED[:1], [0])[0][0]
    ), "a KV cache of the weights' dtype ignores them"


def test_each_layer_of_many_has_its_own_scales(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    config = replace(read_config(tiny_checkpoints["llama"]), num_layers=12)
    form, numbers = FORMS["modelopt"], torch.arange(1.0, 25).view(2, 12)
    named = {form.format(n, kind): numbers["kv".index(kind), n].clone() for n in range(12) for kind in "kv"}
    save_file(named, tmp_path / "model.safetensors")
    scales = kv_scales(Checkpoint(tmp_path), config)
    assert scales is not None
    assert torch.equal(scales[..., -1], numbers)
    assert kv_scales(Checkpoint(tiny_checkpoints["llama"]), config) is None


@pytest.mark.parametrize("size", [1, 3])
def test_a_rank_has_the_scales_of_its_own_heads(tiny_checkpoints: dict[str, Path], tmp_path: Path, size: int) -> None:
    source = tiny_checkpoints["llama"]
    config = read_config(source)
    expected = 0.01 + 0.1 * torch.rand(2, config.num_layers, config.num_kv_heads)
    form = FORMS["compressed-tensors"]
    scales = {form.format(n, kind): expected["kv".index(kind), n] for n in range(config.num_layers) for kind in "kv"}
    folder = with_scales(tmp_path / "scaled", source, {name: scale.clone() for name, scale in scales.items()})
    settings = EngineConfig(model=str(folder), max_batch_size=1, num_gpu_blocks=4, **FP8)
    for rank in range(size):
        model = CausalLM(Shard(rank, size).local(config), 64).to_empty(device="cpu")
        view: Any = PagedMemory(storages=STORAGES)(settings, model, 64)[1]
        heads = Shard(rank, size).part(config.num_kv_heads)
        found = [torch.stack([scale[name] for scale in view.storage.arguments]) for name in ("k_scales", "v_scales")]
        assert torch.equal(torch.stack(found), expected[..., heads.start : heads.stop])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": None}, r"none for the values of layer 0; a checkpoint has them for all layers, or for none"),
        ({"k": torch.tensor(0.0)}, r"layers.0.self_attn.k_scale in .* is \[0.0\]; .* must be positive and finite"),
        ({"k": torch.tensor(-1.0)}, r"layers.0.self_attn.k_scale in .* is \[-1.0\]"),
        ({"v": torch.tensor(math.nan)}, r"layers.0.self_attn.v_scale in .* is \[nan\]"),
        ({"k": torch.ones(2)}, r"layers.0.self_attn.k_scale in .* has 2 numbers; .* one for each of 3 KV heads"),
    ],
    ids=["missing", "zero", "negative", "nan", "shape"],
)
def test_scales_that_cannot_be(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, change: dict[str, torch.Tensor | None], message: str
) -> None:
    source = tiny_checkpoints["llama"]
    form = FORMS["compressed-tensors"]
    one = {form.format(n, kind): torch.tensor(1.0) for n in range(read_config(source).num_layers) for kind in "kv"}
    scales = one | {form.format(0, kind): scale for kind, scale in change.items()}
    named = {name: scale for name, scale in scales.items() if scale is not None}
    folder = with_scales(tmp_path / "scaled", source, named)
    with pytest.raises(ModelFolderError, match=message):
        make(folder, max_seq_len=64, **FP8)


@pytest.mark.parametrize("has_scales", [True, False])
def test_what_a_layer_reads_was_stored_by_the_scales_of_its_keys_and_values(
    tiny_checkpoints: dict[str, Path], has_scales: bool
) -> None:
    """Without scales they are 1."""
    config, sizes = read_config(tiny_checkpoints["llama"]), PagedSizes(4, 4, 1, 16, 16)
    generator = torch.Generator().manual_seed(0)
    scales = 0.01 + 0.1 * torch.rand(2, config.num_layers, config.num_kv_heads, generator=generator)
    scales = scales if has_scales else torch.ones_like(scales)
    storage = Fp8Storage(config, sizes, torch.float32, scales=scales if has_scales else None)
    view = paged_view(config, sizes, storage=storage)
    pool, request = PagedKVCachePool.of(sizes), make_request("a", range(9))
    assert pool.reserve(request, 9)
    view.load(Batch.of(step_of({request: 9}), pool))
    for layer in range(config.num_layers):
        heads = torch.randn(9, config.num_heads + 2 * config.num_kv_heads, config.head_dim, generator=generator)
        q, k, v = heads.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), 1)
        view.write(layer, q, k, v, torch.arange(9), lambda q, k, positions: (q, k))
        k, v = (dequantized(quantized(x, s), s, x.dtype) for x, s in zip((k, v), scales[:, layer], strict=True))
        expected = ATTENTION_BACKENDS["naive"](q, k.transpose(0, 1), v.transpose(0, 1), scale=0.3)
        torch.testing.assert_close(view.attend(layer, q, scale=0.3), expected)


@pytest.mark.demo
def test_the_demo_model_says_nearly_the_same(demo_folder: Path) -> None:
    """The mean divergence of its logits over a page of text; to keys and values in bf16 it is 5e-5."""
    model, text = load_model(demo_folder), (Path(__file__).parents[2] / "docs/PHASE_06.md").read_text(encoding="utf-8")
    token_ids = Tokenizer.load(demo_folder).encode(text)[:128]
    sizes = PagedSizes(8, 16, 1, 128, 128)
    logits = []
    for view in (
        paged_view(model.config, sizes, model.dtype),
        paged_view(model.config, sizes, model.dtype, storage=Fp8Storage(model.config, sizes, model.dtype)),
    ):
        pool, request = PagedKVCachePool.of(sizes), make_request("a", token_ids)
        assert pool.reserve(request, len(token_ids))
        batch = Batch.of(step_of({request: len(token_ids)}), pool)
        with torch.inference_mode():
            logits.append(model.logits(model(view.load(batch).tokens, view)).double().log_softmax(-1))
    divergence = F.kl_div(logits[1], logits[0], reduction="none", log_target=True).sum(-1)
    assert 1e-3 < divergence.mean() < 3e-2

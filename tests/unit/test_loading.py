"""Loading: what is refused and how it is said, what memory it takes, and that damaged folders never crash it."""

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from shared.cache.view.uncached import UncachedView
from shared.checkpoints.make import make_checkpoint
from shared.checkpoints.quantize import quantize_checkpoint
from shared.checkpoints.shapes import SHAPES
from shared.errors import ConfigError, InferError, ModelFolderError
from shared.loading.checkpoint import Checkpoint
from shared.loading.config_json import read_config
from shared.loading.loader import load_model
from shared.loading.placement import default_dtype
from shared.loading.quantized import quantizer
from shared.loading.resolve import HUB_FILES, resolve_model
from shared.loading.sources import Source
from shared.loading.weights import fill
from shared.models.tokens import Tokens
from shared.parity.reference import load_reference
from shared.quantization.rounding import quantize
from shared.quantization.weight import dequantize

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the tiny Llama that a test may damage."""
    return Path(shutil.copytree(tiny_checkpoints["llama"], tmp_path / "model"))


@pytest.fixture
def sharded(folder: Path) -> Path:
    """The same checkpoint in two shards with an index."""
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, held in shards.items():
        save_file({name: tensors[name] for name in held}, folder / shard)
    weight_map = {name: shard for shard, held in shards.items() for name in held}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / WEIGHTS).unlink()
    return folder


def edit_weights(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    tensors = load_file(folder / WEIGHTS)
    for name, tensor in change.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, folder / WEIGHTS)


def test_shards_load_as_the_single_file_does(tiny_checkpoints: dict[str, Path], sharded: Path) -> None:
    """In the dtype that is asked for, fp32 by default on a CPU; a checkpoint tells shapes without reading tensors."""
    whole, parts = load_model(tiny_checkpoints["llama"]), load_model(sharded)
    for (name, a), (_, b) in zip(whole.named_parameters(), parts.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert {p.dtype for p in whole.parameters()} == {torch.float32}
    assert default_dtype(replace(read_config(sharded), dtype="bfloat16"), torch.device("cpu")) == torch.float32
    assert {p.dtype for p in load_model(sharded, dtype=torch.bfloat16).parameters()} == {torch.bfloat16}
    checkpoint = Checkpoint(sharded)
    save_file({"whole": torch.zeros(1)}, sharded / WEIGHTS)
    assert Checkpoint(sharded).names == {"whole"}, "a single file comes before an index"
    assert all(checkpoint.shape(name) == tuple(checkpoint.tensor(name).shape) for name in checkpoint.names)


@pytest.mark.parametrize("stored", ["no head", "a copy", "a head of its own", "only the head"])
def test_a_tied_head_is_the_embedding(
    folder: Path, tmp_path: Path, stored: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Unless the checkpoint has another, which transformers reads too; plain, quantized while loading, and before."""
    embedding = load_file(folder / WEIGHTS)["model.embed_tokens.weight"]
    has_own, ids = stored == "a head of its own", torch.arange(3, 40)
    if stored != "no head":
        edit_weights(folder, {"lm_head.weight": embedding.flip(0).contiguous() if has_own else embedding.clone()})
    if stored == "only the head":
        edit_weights(folder, {"model.embed_tokens.weight": None})
    model = load_model(folder)
    assert model.config.tie_word_embeddings != has_own
    assert ("a head that is not its embedding" in caplog.text) == has_own
    assert (model.head.weight.data_ptr() == model.embedding.weight.data_ptr()) != has_own
    with torch.inference_mode():
        expected = load_reference(folder, torch.float32)(ids[None], use_cache=False).logits[0]
        found = model.logits(model(Tokens(ids, torch.arange(37)), UncachedView([37])))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)

    written = load_model(quantize_checkpoint(folder, tmp_path / "int8", "int8"), quantize=quantizer())
    assert torch.equal(written.head.weight, model.head.weight)
    assert torch.equal(written.embedding.weight, model.embedding.weight)
    rounded = load_model(folder, quantize=quantizer("int8", quantize_head=True))
    assert torch.equal(rounded.embedding.weight, model.embedding.weight)
    assert torch.equal(dequantize(rounded.head.weight), dequantize(quantize(model.head.weight, "int8")))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_quantized_head_beside_tied_embeddings_is_the_head(kind: str, folder: Path, tmp_path: Path) -> None:
    """Also where none of its tensors has the name of a plain one, as with int4."""
    head = load_file(folder / WEIGHTS)["model.embed_tokens.weight"].flip(0).contiguous()
    edit_weights(folder, {"lm_head.weight": head})
    written = quantize_checkpoint(folder, tmp_path / kind, kind, quantize_head=True)
    config = json.loads((written / "config.json").read_text()) | {"tie_word_embeddings": True}
    (written / "config.json").write_text(json.dumps(config))
    assert torch.equal(
        dequantize(load_model(written, quantize=quantizer()).head.weight), dequantize(quantize(head, kind))
    )


def test_missing_unexpected_and_misshaped_tensors_are_one_error(folder: Path) -> None:
    norm = load_file(folder / WEIGHTS)["model.norm.weight"]
    edit_weights(
        folder,
        {
            "model.layers.0.mlp.up_proj.weight": None,
            "model.layers.1.mlp.up_proj.weight": None,
            "model.norm.weight": norm[:-1].clone(),
            "model.layers.0.mlp.extra.weight": norm,
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),  # of old checkpoints, and passed over
        },
    )
    with pytest.raises(ModelFolderError) as caught:
        load_model(folder)
    message = str(caught.value)
    assert "2 missing: model.layers.0.mlp.up_proj.weight, model.layers.1.mlp.up_proj.weight" in message
    assert f"model.norm.weight ([{len(norm) - 1}], not [{len(norm)}])" in message
    assert "1 unexpected: model.layers.0.mlp.extra.weight" in message


def test_unexpected_tensors_alone_are_refused_and_twelve_are_listed(tiny_checkpoints: dict[str, Path]) -> None:
    checkpoint, norm = Checkpoint(tiny_checkpoints["llama"]), torch.nn.Linear(1, 1, bias=False)
    source_of = {"weight": Source.whole("model.norm.weight")}
    norm.weight = torch.nn.Parameter(checkpoint.tensor("model.norm.weight"))
    for count in (1, 12, 13):
        others = [f"t{number:02}" for number in range(count)]
        listed = ", ".join(others[:12]) + ", …" * (count > 12)
        with pytest.raises(ModelFolderError, match=rf"config.json: {count} unexpected: {listed}\. Fetch"):
            fill(norm, source_of, checkpoint, torch.float32, "cpu", others)


OUTSIDE = r"names the shard .* which leads out of the folder"


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        *((name, OUTSIDE) for name in ("../b.safetensors", "/etc/b.safetensors", "x/../../b.safetensors")),
        ("..\\b.safetensors", OUTSIDE),
        *((name, "never pickled") for name in ("b.bin", "b.pt", "", "b\0.safetensors")),
        ("a.safetensors", "in files that do not hold them"),
    ],
)
def test_a_shard_that_an_index_may_not_name_is_refused(sharded: Path, shard: str, message: str) -> None:
    shutil.copy(sharded / "b.safetensors", sharded.parent / "b.safetensors")
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"] = {name: shard if s == "b.safetensors" else s for name, s in index["weight_map"].items()}
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelFolderError, match=message):
        load_model(sharded)


@pytest.mark.parametrize("weights", [WEIGHTS, "b.safetensors"])
def test_a_link_out_of_the_folder_is_refused(folder: Path, weights: str, request: pytest.FixtureRequest) -> None:
    if weights != WEIGHTS:
        request.getfixturevalue("sharded")
    outside = folder.parent / f"{folder.name}-outside.safetensors"  # a name that begins alike
    (folder / weights).rename(outside)
    (folder / weights).symlink_to(outside)
    with pytest.raises(ModelFolderError, match="a link that leads out of the folder"):
        load_model(folder)


@pytest.mark.parametrize("name", ["blobs", "files"])
def test_a_snapshot_of_the_hubs_cache_may_link_to_its_blobs(folder: Path, tmp_path: Path, name: str) -> None:
    snapshot, blobs = tmp_path / "models--a--b/snapshots/0123", tmp_path / f"models--a--b/{name}"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in folder.iterdir():
        path.rename(blobs / path.name)
        (snapshot / path.name).symlink_to(Path(f"../../{name}") / path.name)
    is_cache = name == "blobs"
    with contextlib.nullcontext() if is_cache else pytest.raises(ModelFolderError, match="leads out of the folder"):
        load_model(snapshot)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pkl"])
def test_pickled_weights_are_refused(folder: Path, name: str) -> None:
    (folder / WEIGHTS).rename(folder / name)
    with pytest.raises(ModelFolderError, match=f"{name}, a pickle"):
        load_model(folder)


def test_no_weights_missing_index_and_missing_shard_are_told_apart(sharded: Path) -> None:
    (sharded / "b.safetensors").unlink()
    with pytest.raises(ModelFolderError, match=r"lacks the weight file b\.safetensors"):
        load_model(sharded)
    (sharded / INDEX).unlink()
    with pytest.raises(ModelFolderError, match=r"the index tells which shard"):
        load_model(sharded)
    (sharded / "a.safetensors").unlink()
    with pytest.raises(ModelFolderError, match="holds no weights"):
        load_model(sharded)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', "{" * 10000])
def test_a_damaged_index_is_refused(sharded: Path, text: str) -> None:
    (sharded / INDEX).write_text(text)
    with pytest.raises(ModelFolderError):
        load_model(sharded)


def test_a_truncated_file_is_refused_at_every_length(folder: Path) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    for kept in (0, 4, 8, 100, len(whole) // 2, len(whole) - 1):
        (folder / WEIGHTS).write_bytes(whole[:kept])
        with pytest.raises(ModelFolderError, match="truncated or damaged"):
            load_model(folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/no/such/folder", "neither a folder nor a known model"),
        ("no-such-model", "neither a folder nor a known model"),
        ("a/b/c", "neither a folder nor a known model"),
        ("some-owner/", "neither a folder nor a known model"),
        ("pyproject.toml", "is a file"),
        ("some-owner/some-model", "could not be downloaded from the hub"),
        ("smollm2-135m", "has not been fetched yet; run `infer model pull smollm2-135m` once"),
    ],
)
def test_a_wrong_name_says_what_a_name_may_be(
    name: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("INFER_CACHE", str(tmp_path))
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelFolderError, match=message):
        resolve_model(name)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download := Mock(side_effect=TimeoutError))
    with pytest.raises(ModelFolderError, match=r"from the hub: TimeoutError\. Check"):  # an error without a text
        resolve_model("some-owner/some-model")
    assert download.call_args.kwargs["allow_patterns"] == HUB_FILES
    monkeypatch.setenv("HOME", str(Path.cwd()))
    assert resolve_model("~/tests") == Path.cwd() / "tests"
    (tmp_path / "smollm2-135m").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("smollm2-135m") == Path("smollm2-135m"), "a folder comes before a known name"


def test_a_device_that_is_not_there_and_positions_out_of_range_are_refused(tiny_checkpoints: dict[str, Path]) -> None:
    for device in ("tpu", f"cuda:{torch.cuda.device_count()}", "meta"):
        with pytest.raises(ConfigError, match="device"):
            load_model(tiny_checkpoints["llama"], device=device)
    for positions in (0, -1, 1 << 20):
        with pytest.raises(ConfigError, match=f"max_positions is {positions}"):
            load_model(tiny_checkpoints["llama"], max_positions=positions)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_mutated_folders_load_or_are_refused_in_words(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, seed: int
) -> None:
    """Bytes flipped, cut, inserted in the configuration and in the weights' header."""
    rng = random.Random(seed)
    source = tiny_checkpoints[rng.choice(["llama", "qwen3", "gemma3_text"])]
    folder = tmp_path / "fuzzed"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    path = folder / rng.choice(["config.json", "config.json", WEIGHTS])
    data = bytearray(path.read_bytes())
    reach = 4000  # the header, where structure is
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(min(len(data), reach))
        match rng.randrange(4):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                del data[at : at + rng.randint(1, 40)]
            case 2:
                data[at:at] = rng.choice([b"0", b"-", b"9" * 12, b"null", b"{", b'"', b"1e999", b"\xff"])
            case 3:
                data[at : at + 1] = bytes([data[at] ^ (1 << rng.randrange(8))])
    path.write_bytes(data)
    with contextlib.suppress(InferError):
        load_model(folder)


RSS_PROBE = textwrap.dedent("""
    import re, sys, threading, time
    import torch
    from shared.loading.loader import load_model
    def anonymous():
        return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
    torch.ones(256, 256, dtype=torch.bfloat16).float()  # thread pools and allocator, before the baseline
    base, peak, done = anonymous(), 0, False
    def watch():
        global peak
        while not done:
            peak = max(peak, anonymous())
            time.sleep(0.0005)
    watcher = threading.Thread(target=watch)
    watcher.start()
    model = load_model(sys.argv[1], dtype=getattr(torch, sys.argv[2]))
    peak = max(peak, anonymous())
    done = True
    watcher.join()
    print(peak - base, sum(p.nbytes for p in model.parameters()))
""")


@pytest.mark.skipif(sys.platform != "linux", reason="reads RssAnon from /proc")
@pytest.mark.parametrize(("stored", "wanted"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_loading_takes_little_more_memory_than_the_weights(tmp_path: Path, stored: str, wanted: str) -> None:
    """Peak anonymous memory above the baseline, within 1.3 times the weights in the target dtype."""
    _wide_checkpoint(tmp_path, stored)
    command = [sys.executable, "-c", RSS_PROBE, str(tmp_path / "model"), wanted]
    root = Path(__file__).parents[2]
    env = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=True)
    peak, weights = map(int, done.stdout.split())
    assert weights > 60e6
    assert peak <= 1.3 * weights, f"{peak / weights:.2f} times the weights"


def _wide_checkpoint(tmp_path: Path, stored: str) -> None:
    """A Llama of some 42 million parameters, in shards: large beside the noise of an interpreter."""
    shape = {"vocab_size": 8000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 3}
    shape |= {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPES, "wide", SHAPES["tiny-llama"] | shape)
        make_checkpoint("wide", tmp_path / "model", dtype=stored, max_shard_bytes=50_000_000)

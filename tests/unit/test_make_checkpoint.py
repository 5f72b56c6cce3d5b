"""Made checkpoints: transformers loads them, values are reproducible, foreign folders are safe."""

import io
import json

import pytest
import torch
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from shared.checkpoints.make import DTYPES, checkpoint_tensors, make_checkpoint, plan_shards, random_tensor
from shared.checkpoints.manifest import MANIFEST_NAME
from shared.checkpoints.progress import progress_bar
from shared.checkpoints.safetensors_writer import write_safetensors
from shared.checkpoints.shapes import SHAPES
from shared.errors import InferError

TINY = ["tiny-llama", "tiny-qwen3", "tiny-gemma3"]


@pytest.mark.parametrize("shape", list(SHAPES))
def test_names_and_shapes_are_those_of_transformers(shape, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[shape]))
    config = AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert dict(checkpoint_tensors(SHAPES[shape])) == expected


@pytest.mark.parametrize("shape", TINY)
def test_transformers_loads_it_and_generates(shape, tmp_path):
    folder = make_checkpoint(shape, tmp_path / "model")
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    assert model.dtype == torch.float32
    prompt = AutoTokenizer.from_pretrained(folder)("The capital of", return_tensors="pt").input_ids
    ids = model.generate(prompt, max_new_tokens=24, min_new_tokens=24, do_sample=False)
    with torch.no_grad():
        logits = model(ids).logits[0, prompt.shape[1] - 1 : -1]
    best = logits.topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > 1e-3  # far above fp32 rounding: greedy parity tests rely on this
    assert 1.0 < logits.std() < 4.0
    assert len(set(ids[0].tolist())) > 8  # does not repeat one token forever


def test_shards_hold_the_same_values_as_one_file(tmp_path):
    whole = load_file(make_checkpoint("tiny-qwen3", tmp_path / "whole", seed=3) / "model.safetensors")
    folder = make_checkpoint("tiny-qwen3", tmp_path / "shards", seed=3, max_shard_bytes=200_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert sorted(set(index["weight_map"].values())) == files
    parts = {name: load_file(folder / name) for name in files}
    assert index["weight_map"].keys() == whole.keys()
    assert all(torch.equal(parts[file][name], whole[name]) for name, file in index["weight_map"].items())
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in whole.values())
    _, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())


def test_values_depend_on_seed_and_name_alone(tmp_path):
    folders = [make_checkpoint("tiny-llama", tmp_path / str(n), seed=seed) for n, seed in enumerate((1, 1, 2))]
    first, again, other = (load_file(folder / "model.safetensors") for folder in folders)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(first[name], random_tensor(name, tuple(first[name].shape), family="llama", seed=1))
    assert not torch.equal(first[name], first[name.replace("layers.1", "layers.2")])


@pytest.mark.parametrize(("family", "centre"), [("llama", 1.0), ("gemma3_text", 0.0)])
def test_norm_weights_scatter_around_the_neutral_value(family, centre):
    weight = random_tensor("model.layers.0.input_layernorm.weight", (4096,), family=family)
    assert weight.mean().item() == pytest.approx(centre, abs=0.02)
    assert weight.std().item() == pytest.approx(0.2, rel=0.1)


def test_dtype_replaces_the_shapes_own(tmp_path):
    folder = make_checkpoint("tiny-llama", tmp_path, dtype="bfloat16")
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118


def test_plan_shards_keeps_order_and_limits():
    layout = [("a", (10,)), ("b", (10,)), ("huge", (100,)), ("c", (5,))]
    shards = plan_shards(layout, item_bytes=2, max_bytes=40)
    assert [[name for name, _ in shard] for shard in shards] == [["a", "b"], ["huge"], ["c"]]


def test_progress_ends_at_the_total(tmp_path):
    seen = []
    folder = make_checkpoint("tiny-gemma3", tmp_path, progress=lambda *call: seen.append(call))
    stages, done, totals = zip(*seen, strict=True)
    assert set(stages) == {"write"}
    assert list(done) == sorted(done)
    assert done[-1] == totals[0] < (folder / "model.safetensors").stat().st_size


def test_the_progress_bar_shows_every_stage(tmp_path):
    screen = io.StringIO()
    with progress_bar(Console(file=screen, force_terminal=True, width=120)) as progress:
        progress("download", 1, 4)
        make_checkpoint("tiny-llama", tmp_path, progress=progress)
    assert "download" in screen.getvalue()
    assert "write" in screen.getvalue()
    assert "1.1/1.1 MB" in screen.getvalue()


def test_a_finished_checkpoint_is_kept_and_another_overwritten(tmp_path):
    weights = make_checkpoint("tiny-qwen3", tmp_path, max_shard_bytes=200_000) / "model-00001-of-00005.safetensors"
    folder = weights.parent
    first = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    make_checkpoint("tiny-qwen3", folder, max_shard_bytes=200_000)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == first
    make_checkpoint("tiny-llama", folder)
    assert [path.name for path in folder.glob("*.safetensors")] == ["model.safetensors"]
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"


def test_an_interrupted_one_is_no_model_and_can_be_made_again(tmp_path):
    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_checkpoint("tiny-llama", tmp_path, progress=interrupt)
    assert not (tmp_path / "config.json").exists()
    make_checkpoint("tiny-llama", tmp_path)
    assert (tmp_path / "config.json").exists()


def test_foreign_files_are_never_touched_and_added_ones_not_removed(tmp_path):
    foreign, made = tmp_path / "foreign", make_checkpoint("tiny-llama", tmp_path / "made")
    foreign.mkdir()
    for folder in (foreign, made):
        (folder / "thesis.txt").write_text("ten years of work")
        with pytest.raises(InferError, match=r"thesis\.txt.*new or an empty folder"):
            make_checkpoint("tiny-llama", folder, seed=1)
        assert (folder / "thesis.txt").read_text() == "ten years of work"
    assert [path.name for path in foreign.iterdir()] == ["thesis.txt"]
    assert (made / MANIFEST_NAME).exists()
    with pytest.raises(InferError, match="cannot be written"):
        make_checkpoint("tiny-llama", foreign / "thesis.txt")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": "llama-9000b"}, "llama-9000b.*tiny-gemma3"),
        ({"dtype": "int4"}, "int4.*bfloat16"),
        ({"device": "warp"}, "warp.*cpu or cuda"),
        ({"device": "meta"}, "meta.*cpu or cuda"),
        ({"max_shard_bytes": 0}, "max_shard_bytes is 0"),
    ],
)
def test_bad_arguments_are_one_sentence(arguments, message, tmp_path):
    with pytest.raises(InferError, match=message):
        make_checkpoint(**({"shape": "tiny-llama", "folder": tmp_path / "x"} | arguments))
    assert not (tmp_path / "x").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_is_refused_where_there_is_none(tmp_path):
    with pytest.raises(InferError, match="no CUDA device here"):
        make_checkpoint("tiny-llama", tmp_path, device="cuda")


@pytest.mark.parametrize("dtype", list(DTYPES.values()))
def test_the_writer_is_read_by_the_library(dtype, tmp_path):
    tensors = {"b": torch.randn(3, 5), "a": torch.randn(7), "empty": torch.zeros(0, 4), "t": torch.randn(4, 2).T}
    layout = [(name, tuple(tensor.shape)) for name, tensor in tensors.items()]
    write_safetensors(tmp_path / "x.safetensors", layout, dtype, iter(tensors.values()))
    assert int.from_bytes((tmp_path / "x.safetensors").read_bytes()[:8], "little") % 8 == 0, "data is aligned"
    read = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(read[name], tensor.to(dtype)) for name, tensor in tensors.items())
    with pytest.raises(ValueError, match="layout says"):
        write_safetensors(tmp_path / "y.safetensors", [("a", (2, 2))], dtype, [torch.zeros(4)])

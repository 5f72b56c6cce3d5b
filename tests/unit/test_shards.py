"""A rank's part of a model: what is cut where, and that the parts compute what the whole model computes."""

from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.nn import Parameter

from shared.cache.view.uncached import UncachedView
from shared.checkpoints.shapes import SHAPES
from shared.errors import ConfigError
from shared.loading.checkpoint import Checkpoint
from shared.loading.config_json import parse_config, read_config
from shared.loading.loader import load_model
from shared.loading.quantized import quantizer
from shared.models.causal_lm import CausalLM
from shared.models.config import ModelConfig
from shared.models.fused import fuse
from shared.models.projection import Projection
from shared.models.tokens import Tokens
from shared.quantization.rounding import quantize
from shared.quantization.weight import QuantizedWeight, dequantize
from shared.tracks.ranks.collectives import Collectives
from shared.tracks.ranks.model import load_part
from shared.tracks.ranks.model_shard import COLUMNS, ROWS, ModelShard, ShardCheckpoint, TensorShard, shard_weight
from shared.tracks.ranks.projection import RowParallelProjection
from shared.tracks.ranks.shard import Shard, possible_sizes
from shared.tracks.ranks.vocabulary import Vocabulary
from tests.comparison import assert_close, assert_equal, assert_rows_close
from tests.ranks import FAMILIES, checkpoint_for_ranks, on_ranks

LENGTHS = (9, 1, 21)
BORDERS = tuple(product((1, 2, 3), (-1, 0, 1)))  # ids around those at which the parts of two or four ranks begin


def config_of(num_heads: int, num_kv_heads: int) -> ModelConfig:
    options = {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "head_dim": 4}
    return parse_config(SHAPES["tiny-llama"] | options)


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, session_folder: Path) -> Path:
    return checkpoint_for_ranks(request.param, session_folder)


# What is cut where.


@pytest.mark.parametrize(
    ("heads", "size", "expected"),
    [
        pytest.param((8, 4), 2, [((0, 4), (0, 2)), ((4, 8), (2, 4))], id="KV heads are cut"),
        pytest.param((9, 3), 3, [((0, 3), (0, 1)), ((3, 6), (1, 2)), ((6, 9), (2, 3))], id="a KV head a rank"),
        pytest.param((8, 2), 4, [((0, 2), (0, 1)), ((2, 4), (0, 1)), ((4, 6), (1, 2)), ((6, 8), (1, 2))], id="shared"),
        pytest.param((4, 1), 2, [((0, 2), (0, 1)), ((2, 4), (0, 1))], id="one KV head"),
        pytest.param((5, 5), 1, [((0, 5), (0, 5))], id="one rank"),
    ],
)
def test_the_heads_of_each_rank(heads: tuple[int, int], size: int, expected: list[Any]) -> None:
    found = [tuple((part.start, part.stop) for part in Shard(n, size).heads(config_of(*heads))) for n in range(size)]
    assert_equal(found, expected, f"query and KV heads of {heads}", ("rank", "queries or keys", "begin or end"))


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 8))
def test_every_query_head_stands_once_and_with_its_kv_head(group: int, num_kv_heads: int, size: int) -> None:
    config = config_of(group * num_kv_heads, num_kv_heads)
    if size not in possible_sizes(config):
        with pytest.raises(ConfigError, match=f"tensor_parallel_size is {size} and the model has {config.num_heads} "):
            Shard(0, size).heads(config)
        return
    parts = [Shard(rank, size).heads(config) for rank in range(size)]
    found = [head for queries, _ in parts for head in queries]
    assert_equal(found, list(range(config.num_heads)), "query heads of all ranks", ("head",))
    for rank, (queries, keys) in enumerate(parts):
        assert Shard(rank, size).local(config).first_kv_head == keys.start, f"first KV head of rank {rank}"
        local_group = len(queries) // len(keys)
        read = [keys[n // local_group] for n in range(len(queries))]
        assert_equal(read, [head // group for head in queries], f"KV head of each of {queries}", ("head",))


@given(st.integers(1, 300), st.integers(1, 8), st.sampled_from([1, 7, 32, 128]))
def test_parts_cover_everything_once(total: int, size: int, multiple: int) -> None:
    parts = [Shard(rank, size).part(total, multiple) for rank in range(size)]
    assert [n for part in parts for n in part] == list(range(total))
    assert all(part.start % multiple == 0 for part in parts if part)
    assert max(map(len, parts)) - min(map(len, parts)) <= 2 * multiple


def test_a_rank_without_work_is_refused() -> None:
    config = parse_config(SHAPES["tiny-llama-ranks"])
    with pytest.raises(ConfigError, match="160 columns of the MLP, which are cut at multiples of 128: rank 2 would"):
        Shard(2, 4).local(config, 128)


# What a rank reads.


def test_a_rank_reads_its_part_and_no_more(folder: Path) -> None:
    config, size = read_config(folder), 2
    whole = load_model(folder)
    for rank in range(size):
        checkpoint = ShardCheckpoint(folder, ModelShard(Shard(rank, size), config))
        cut_bytes = sum(checkpoint.tensor(name).nbytes for name in checkpoint.names if checkpoint.tensor(name).ndim > 1)
        assert cut_bytes <= 1.05 * sum(p.nbytes for p in whole.parameters() if p.ndim > 1) / size
    first, second = (ShardCheckpoint(folder, ModelShard(Shard(rank, size), config)) for rank in range(size))
    block, layer = whole.blocks[1], "model.layers.1"
    name = f"{layer}.self_attn.k_proj.weight"
    assert torch.equal(torch.cat([first.tensor(name), second.tensor(name)]), block.attention.qkv.k_proj.weight)
    name = f"{layer}.mlp.down_proj.weight"
    assert torch.equal(torch.cat([first.tensor(name), second.tensor(name)], 1), block.mlp.down_proj.weight)
    assert first.shape(name) == tuple(first.tensor(name).shape)
    other = ShardCheckpoint(folder, ModelShard(Shard(0, size), replace(config, intermediate_size=4)))
    assert other.shape(name) == tuple(other.tensor(name).shape) == tuple(block.mlp.down_proj.weight.shape)


def test_a_bias_is_cut_with_the_rows_of_its_matrix(tmp_path: Path) -> None:
    """And not with columns: it is added once, after the sum."""
    config, prefix = config_of(4, 2), "model.layers.0.self_attn"
    rows, hidden = torch.arange(4.0 * config.head_dim), torch.arange(float(config.hidden_size))
    save_file({f"{prefix}.q_proj.bias": rows, f"{prefix}.o_proj.bias": hidden}, tmp_path / "model.safetensors")
    for rank, part in enumerate(rows.chunk(2)):
        checkpoint = ShardCheckpoint(tmp_path, ModelShard(Shard(rank, 2), config))
        assert torch.equal(checkpoint.tensor(f"{prefix}.q_proj.bias"), part)
        assert torch.equal(checkpoint.tensor(f"{prefix}.o_proj.bias"), hidden)


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_whether_another_rank_is_lost_is_asked_before_each_tensor(
    session_folder: Path, quantization: str | None
) -> None:
    folder, asked = checkpoint_for_ranks("llama", session_folder), []
    load = partial(load_part, folder, quantization=quantization, check=lambda: asked.append(1))
    on_ranks(1, load)
    assert len(asked) >= len(Checkpoint(folder).names)


def quantized(method: str, rows: int = 300, columns: int = 384) -> QuantizedWeight:
    torch.manual_seed(0)
    if method == "blocks":
        values = torch.randn(rows, columns).to(torch.float8_e4m3fn)
        return QuantizedWeight(values, torch.rand(-(-rows // 128), columns // 128), None, 128, 128)
    weight = quantize(torch.randn(rows, columns), method)
    if method == "int4":
        weight = QuantizedWeight(weight.values, weight.scales, torch.randint(0, 16, weight.scales.shape), 128)
    return weight


@pytest.mark.parametrize("method", ["fp8", "int8", "int4", "blocks"])
@settings(max_examples=30)
@given(begin=st.integers(0, 8), length=st.integers(1, 12))
@example(begin=2, length=4)  # rows 64 to 192: both ends are inside a block
@example(begin=2, length=6)  # rows 64 to 256: only the beginning is inside a block
@example(begin=0, length=6)  # rows 0 to 192: only the end is
def test_a_quantized_matrix_is_cut_with_its_scales(method: str, begin: int, length: int) -> None:
    """Wherever the part begins and ends: at a border of blocks, within a block, or after several."""
    whole = quantized(method)
    for dim in (ROWS, COLUMNS):
        part = range(32 * begin, min(32 * (begin + length), whole.shape[dim]))
        found = shard_weight(whole, TensorShard(dim, part, whole.shape[dim]))
        assert torch.equal(dequantize(found), dequantize(whole).narrow(dim, part.start, len(part)))
        for tensor in (found.values, found.scales, found.zeros):
            if tensor is not None and tensor is not whole.scales:
                assert tensor.untyped_storage().nbytes() == tensor.nbytes, "more than the part is kept alive"


def test_columns_within_a_block_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"columns 40 to 80, and each 128 columns have a scale; parts must begin"):
        shard_weight(quantized("int4"), TensorShard(COLUMNS, range(40, 80), 256))


# What the parts compute.


@pytest.mark.parametrize(("bias", "activation"), [(False, None), (True, None), (True, "silu")])
def test_the_row_parallel_sum(bias: bool, activation: str | None) -> None:
    torch.manual_seed(0)
    x, weight, b = torch.randn(3, 12), torch.randn(5, 12), torch.randn(5)
    residual: torch.Tensor | None = torch.randn(3, 5)
    function = None if activation is None else torch.nn.functional.silu

    def run(ranks: Collectives) -> torch.Tensor:
        part = Shard(ranks.rank, ranks.size).part(12)
        projection = Projection(len(part), 5, bias)
        projection.weight = Parameter(weight[:, part.start : part.stop], requires_grad=False)
        if bias:
            projection.bias = Parameter(b, requires_grad=False)
        return RowParallelProjection(projection, ranks)(
            x[:, part.start : part.stop], residual=residual, activation=function
        )

    y = x @ weight.T + (b if bias else 0)
    expected = residual + (y if function is None else function(y))
    for found in on_ranks(3, run):
        assert_close(found, expected, "the sum", ("row", "output"), atol=1e-5)
    residual = None
    for found in on_ranks(3, run):
        assert_close(found, y if function is None else function(y), "without residual", ("row", "output"), atol=1e-5)


def test_a_sum_is_added_in_the_order_of_the_ranks() -> None:
    terms = [torch.tensor([1e8]), torch.tensor([-1e8]), torch.tensor([1.0])]
    assert [float(y) for y in on_ranks(3, lambda ranks: ranks.all_sum(terms[ranks.rank]))] == [1.0] * 3
    small = [torch.tensor([each]).bfloat16() for each in (256, 1, 1)]  # bf16 cannot represent 257
    assert [float(y) for y in on_ranks(3, lambda ranks: ranks.all_sum(small[ranks.rank]))] == [258.0] * 3
    assert [float(y) for y in on_ranks(2, lambda ranks: ranks.all_sum(terms[2], terms[2]))] == [3.0] * 2, "a residual"


def test_a_collective_is_counted_where_it_begins_and_where_it_ends() -> None:
    def run(ranks: Collectives) -> tuple[int, torch.Tensor, int]:
        counted: list[int] = []
        ranks.count = lambda: counted.append(1)
        return len(counted), ranks.gathered(torch.arange(6).view(2, 3).t()[ranks.rank]), len(counted)

    for before, gathered, after in on_ranks(2, run):
        assert (before, after) == (0, 2)
        assert gathered.tolist() == [[0, 3], [1, 4]], "parts that are not contiguous"


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_argmax_over_shards(size: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 10)
    logits[1, [3, 8]] = 9.0  # ties, in one shard or in two
    logits[2, :] = 0.0
    logits[3, 9] = 9.0
    logits[4, :] = -torch.inf
    logits[4, 7] = -1e30

    def run(ranks: Collectives) -> tuple[torch.Tensor, torch.Tensor]:
        part = Shard(ranks.rank, ranks.size).part(10)
        vocabulary = Vocabulary(10, ranks)
        own = logits[:, part.start : part.stop]
        return vocabulary.argmax(own), vocabulary.gather(own)

    for ids, gathered in on_ranks(size, run):
        assert_equal(ids.tolist(), logits.argmax(-1).tolist(), "ids", ("row",))
        assert_equal(gathered, logits, "gathered logits", ("row", "id"))
        assert_equal(ids.dtype, torch.int64, "the type of ids")


def test_ids_are_exact_where_logits_are_not() -> None:
    """Bf16 holds integers up to 256 exactly, and ids are larger."""
    logits = torch.zeros(3, 1000, dtype=torch.bfloat16)
    expected = [257, 515, 999]
    logits[range(3), expected] = 1.0

    def run(ranks: Collectives) -> torch.Tensor:
        part = Shard(ranks.rank, ranks.size).part(1000)
        return Vocabulary(1000, ranks).argmax(logits[:, part.start : part.stop])

    for ids in on_ranks(2, run):
        assert_equal(ids.tolist(), expected, "ids", ("row",))


def forward(model: CausalLM) -> torch.Tensor:
    """Logits of all tokens of three sequences: the model's own columns."""
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    size = model.config.vocab_size
    ids = (31 * torch.arange(len(positions))) % size
    ids[: len(BORDERS)] = torch.tensor([quarter * size // 4 + more for quarter, more in BORDERS])
    tokens = Tokens(ids, positions)
    return model.logits(model(tokens, UncachedView(LENGTHS)))


def check_parts(folder: Path, size: int, quantization: str | None = None, bound: float = 1e-5) -> None:
    with torch.inference_mode():
        expected = forward(fuse(load_model(folder, quantize=quantizer(quantization, quantization is not None))))

    def run(ranks: Collectives) -> torch.Tensor:
        model = fuse(load_part(folder, ranks, quantization=quantization, quantize_head=quantization is not None))
        return Vocabulary(model.config.vocab_size, ranks).gather(forward(model))

    found = on_ranks(size, run)
    for logits in found:
        assert torch.equal(logits, found[0])
        assert_rows_close(logits, expected, bound, "logits", ("token", "id"))
    if bound < 0.1:
        assert torch.equal(found[0].argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize(("size", "quantization"), [(2, None), (4, None), (2, "fp8"), (2, "int8")])
def test_the_parts_of_a_model_compute_its_logits(folder: Path, size: int, quantization: str | None) -> None:
    """INT8 on a CPU rounds each product to bf16: here each term of it."""
    check_parts(folder, size, quantization, 0.1 if quantization == "int8" else 1e-5)

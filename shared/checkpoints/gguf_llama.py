"""Converts a GGUF file of the Llama family to the files of a hub folder. Introduced in phase 1b.

A GGUF file contains quantised weights, the tokenizer and the settings. This module memory-maps the file and gives the
hub's equivalents: tensor names and values (dequantised by the `gguf` package), `config.json`, and a `tokenizers`
tokenizer.

Invariant: rows of the query and key projections are converted to the hub's order. GGUF stores them so that RoPE rotates
adjacent pairs (0,1), (2,3), …; the hub's models rotate the halves (0, D/2), (1, D/2 + 1), …
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
from gguf.quants import dequantize
from torch import Tensor

from shared.errors import ModelFolderError

HUB_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
CONTROL_TOKEN = int(gguf.TokenType.CONTROL)


def open_gguf(path: Path) -> gguf.GGUFReader:
    """Memory-map the file; raises ModelFolderError if it is not a GGUF file of the Llama family."""
    try:
        reader = gguf.GGUFReader(path)
        architecture = _field(reader, "general.architecture")
    except (ValueError, IndexError, OSError) as error:
        raise ModelFolderError(f"{path} cannot be read as a GGUF file ({error}); fetch it again.") from error
    if architecture != "llama":
        raise ModelFolderError(f"{path} holds the architecture {architecture!r}; only 'llama' can be converted.")
    return reader


def hub_config(reader: gguf.GGUFReader) -> dict[str, Any]:
    """The `config.json` of a hub folder of this model (hub dialect: `rope_theta`, `torch_dtype`)."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": int(_field(reader, "tokenizer.ggml.bos_token_id")),
        "eos_token_id": int(_field(reader, "tokenizer.ggml.eos_token_id")),
        "pad_token_id": int(_field(reader, "tokenizer.ggml.padding_token_id")),
        "head_dim": int(_field(reader, "llama.rope.dimension_count")),
        "hidden_act": "silu",
        "hidden_size": int(_field(reader, "llama.embedding_length")),
        "intermediate_size": int(_field(reader, "llama.feed_forward_length")),
        "max_position_embeddings": int(_field(reader, "llama.context_length")),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": int(_field(reader, "llama.attention.head_count")),
        "num_hidden_layers": int(_field(reader, "llama.block_count")),
        "num_key_value_heads": int(_field(reader, "llama.attention.head_count_kv")),
        "rms_norm_eps": _shortest(_field(reader, "llama.attention.layer_norm_rms_epsilon")),
        "rope_scaling": None,
        "rope_theta": _shortest(_field(reader, "llama.rope.freq_base")),
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": int(_field(reader, "llama.vocab_size")),
    }


def hub_name(name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`; KeyError for a name outside the family."""
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{int(parts[1])}.{HUB_NAMES[parts[2]]}.{parts[3]}"
    return f"{TOP_NAMES[parts[0]]}.{parts[1]}"


def split_halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder a projection's output rows [heads * D, H] from interleaved RoPE pairs to rotated halves.

    In every head, row 2i goes to i and row 2i + 1 to D/2 + i: the inverse of what llama.cpp does when it converts a
    hub checkpoint to GGUF.
    """
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])  # [heads, D/2, 2, H]
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def hub_layout(reader: gguf.GGUFReader) -> list[tuple[str, tuple[int, ...]]]:
    """(hub name, shape) of every tensor, in the file's order; GGUF lists dimensions fastest first."""
    return [(hub_name(t.name), tuple(int(n) for n in reversed(t.shape))) for t in reader.tensors]


def hub_tensors(reader: gguf.GGUFReader) -> Iterator[Tensor]:
    """Yields the values in the order of `hub_layout`, fp32, dequantised one at a time."""
    num_query_heads = int(_field(reader, "llama.attention.head_count"))
    num_kv_heads = int(_field(reader, "llama.attention.head_count_kv"))
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if tensor.name.endswith("attn_q.weight"):
            values = split_halves(values, num_query_heads)
        elif tensor.name.endswith("attn_k.weight"):
            values = split_halves(values, num_kv_heads)
        yield torch.from_numpy(np.array(values, copy=True))


def hub_tokenizer(reader: gguf.GGUFReader) -> tuple[tokenizers.Tokenizer, list[str]]:
    """The file's byte-level BPE tokenizer and its special tokens; digits are split one by one (`smollm`)."""
    kind = _field(reader, "tokenizer.ggml.pre")
    if kind != "smollm":
        raise ModelFolderError(f"The GGUF file's pre-tokenizer is {kind!r}; only 'smollm' can be converted.")
    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    types: list[int] = _field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer, special


def chat_template(reader: gguf.GGUFReader) -> str:
    """The file's Jinja2 chat template."""
    return _field(reader, "tokenizer.chat_template")


def _field(reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise ModelFolderError(f"The GGUF file lacks the field {key!r}, which the conversion needs.")
    return field.contents()


def _shortest(value: float) -> float:
    """The shortest decimal that rounds to the same fp32: GGUF stores 1e-05 as 9.99999974e-06."""
    return float(str(np.float32(value)))

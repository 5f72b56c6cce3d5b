"""The shapes of generated checkpoints. Introduced in phase 1b.

Each entry of `SHAPES` is a complete `config.json` as on the hub: real models with their true sizes, and tiny ones for
tests, with all features of their family in a few hundred kilobytes.

Invariant: hub dialect (`rope_theta` and `rope_scaling`, `torch_dtype`); the tiny shapes have the features of their
family: odd head counts, grouped queries, Llama 3 RoPE scaling, sliding-window and full layers, tied and untied heads.
"""

from typing import Any

OF_ALL = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}


def _llama3_rope(factor: float, original: int = 8192) -> dict[str, Any]:
    scaling = {"original_max_position_embeddings": original, "rope_type": "llama3"}
    return {"factor": factor, "high_freq_factor": 4.0, "low_freq_factor": 1.0} | scaling


def _llama(**sizes: Any) -> dict[str, Any]:
    of_family = {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": _llama3_rope(32.0),
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "vocab_size": 128256,
    }
    return OF_ALL | of_family | sizes


def _qwen3(**sizes: Any) -> dict[str, Any]:
    of_family = {
        "architectures": ["Qwen3ForCausalLM"],
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "max_window_layers": sizes["num_hidden_layers"],
        "model_type": "qwen3",
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    return OF_ALL | of_family | sizes


def _gemma3(**sizes: Any) -> dict[str, Any]:
    """Gemma's hub config omits that the embeddings are tied, which is the family's default."""
    of_family = {
        "architectures": ["Gemma3ForCausalLM"],
        "attn_logit_softcapping": None,
        "bos_token_id": 2,
        "cache_implementation": "hybrid",
        "eos_token_id": [1, 106],
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 32768,
        "model_type": "gemma3_text",
        "pad_token_id": 0,
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "vocab_size": 262144,
    }
    return OF_ALL | of_family | sizes


def _sizes(hidden: int, intermediate: int, layers: int, heads: int) -> dict[str, int]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return dict(zip(names, (hidden, intermediate, layers, heads), strict=True))


TINY = {"head_dim": 16, "max_position_embeddings": 2048, "torch_dtype": "float32", "vocab_size": 512}


def _tiny_llama(heads: int, **others: Any) -> dict[str, Any]:
    ids = {"bos_token_id": 0, "eos_token_id": [1, 4, 5]}
    rope = {"rope_scaling": _llama3_rope(4.0, 512), "rope_theta": 10000.0}
    return _llama(**_sizes(96, 160, 3, heads) | TINY | ids | rope | others)


def _tiny_qwen3(intermediate: int, heads: int, **others: Any) -> dict[str, Any]:
    ids = {"bos_token_id": 0, "eos_token_id": 2, "tie_word_embeddings": False}
    return _qwen3(**_sizes(64, intermediate, 4, heads) | TINY | ids | others)


def _tiny_gemma3(**others: Any) -> dict[str, Any]:
    windows = {"query_pre_attn_scalar": 24, "sliding_window": 16}
    return _gemma3(**_sizes(72, 144, 8, 4) | TINY | windows | {"num_key_value_heads": 2} | others)


SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": _llama(**_sizes(2048, 8192, 16, 32), head_dim=64),
    # The same keys and values per token as above, and a sixteenth of the weights: for steps that read keys on a CPU.
    "llama-3.2-1b-sixteenth": _llama(
        **_sizes(512, 1024, 16, 32), head_dim=64, vocab_size=16032, bos_token_id=0, eos_token_id=[1, 4, 5]
    ),
    "llama-3.2-3b": _llama(**_sizes(3072, 8192, 28, 24), head_dim=128),
    "llama-3.1-70b": _llama(
        **_sizes(8192, 28672, 80, 64), head_dim=128, tie_word_embeddings=False, rope_scaling=_llama3_rope(8.0)
    ),
    "qwen3-0.6b": _qwen3(**_sizes(1024, 3072, 28, 16)),
    "qwen3-1.7b": _qwen3(**_sizes(2048, 6144, 28, 16)),
    "qwen3-4b": _qwen3(**_sizes(2560, 9728, 36, 32)),
    "qwen3-8b": _qwen3(**_sizes(4096, 12288, 36, 32), tie_word_embeddings=False),
    "gemma-3-1b": _gemma3(**_sizes(1152, 6912, 26, 4), num_key_value_heads=1),
    "tiny-llama": _tiny_llama(6, num_key_value_heads=3),
    "tiny-qwen3": _tiny_qwen3(160, 5, num_key_value_heads=1),
    "tiny-gemma3": _tiny_gemma3(),
    # For several ranks: heads that 2 and 4 divide, KV heads replicated on 4, an odd vocabulary.
    "tiny-llama-ranks": _tiny_llama(8, num_key_value_heads=4, vocab_size=509),
    "tiny-qwen3-ranks": _tiny_qwen3(150, 8, num_key_value_heads=2, vocab_size=511),
    "tiny-gemma3-ranks": _tiny_gemma3(vocab_size=507),
}

"""The rules between the settings of an engine. Introduced in phase 2; a phase adds the rules of its settings.

Most rules are data: what a setting requires, and which two settings exclude each other. Invariant: :func:`check`
accepts no contradiction, and a refusal states the values and the rule. ``config`` is always an EngineConfig.
"""

from typing import Any, NamedTuple

from shared.errors import ConfigError

NEEDS: dict[str, tuple[tuple[str, Any], ...]] = {
    "scheduler_policy": (("batching_mode", "continuous"),),
    "max_decode_interval": (("batching_mode", "continuous"),),
    "block_size": (("kv_cache_backend", "paged"),),
    "num_gpu_blocks": (("kv_cache_backend", "paged"),),
    "prefill_chunk_size": (("use_chunked_prefill", True),),
    "chunk_beside_decoding": (("use_chunked_prefill", True),),
    "prefill_wait_ms": (("use_chunked_prefill", True),),
    "max_prefill_chunks_per_step": (("use_chunked_prefill", True),),
    "use_chunked_prefill": (("batching_mode", "continuous"),),
    "use_prefix_caching": (("kv_cache_backend", "paged"), ("use_chunked_prefill", True)),
    "compress_method": (("kv_cache_backend", "paged"), ("use_chunked_prefill", True)),
    "kv_cache_dtype": (("kv_cache_backend", "paged"),),
    "use_cuda_graphs": (
        ("batching_mode", "continuous"),
        ("kv_cache_backend", "paged"),
        ("attention_backend", "planned"),
    ),
    "use_speculative_decoding": (("batching_mode", "continuous"),),
    "drafter": (("use_speculative_decoding", True),),
    "draft_model": (("use_speculative_decoding", True), ("drafter", "model")),
    "adapter": (("use_speculative_decoding", True), ("kv_cache_backend", "paged")),
    "spec_length": (("use_speculative_decoding", True),),
    "acceptance_method": (("use_speculative_decoding", True),),
    "adapt_spec_length": (("use_speculative_decoding", True),),
}
"""Fields that depend on others: if changed, they require the named fields to have the given values. An optimization
left to the phase (None) is off without its requirements; one set to True is refused."""

COMPRESSION = (
    *("if_fake_compress", "if_log_compress", "if_log_num_topp", "layer_budget", "layer_upper_budget"),
    *("query_window_size", "steps_between_compressions", "p_attn", "attn_reduce_method"),
)
"""Fields that have no meaning without ``compress_method``."""


class Exclusive(NamedTuple):
    """Two fields that cannot both be set, with the reason and the remedy.

    Without ``values``, every value of ``name`` except its default counts; likewise ``other_values`` for ``other``.
    """

    name: str
    other: str
    reason: str
    values: tuple[Any, ...] = ()
    other_values: tuple[Any, ...] = ()
    advice: str = "leave one of them out"

    def has_other(self, config: Any) -> bool:
        return _is_set(config, self.other, self.other_values)


COMPILED = "compiled products have plain weights"
EXCLUSIVE = (
    Exclusive(
        "attention_backend",
        "kv_cache_backend",
        "planned attention works on blocks",
        ("planned",),
        ("contiguous",),
        "leave attention_backend out, or choose kv_cache_backend 'paged'",
    ),
    Exclusive("prefill_chunk_size", "chunk_beside_decoding", "prefill_chunk_size holds beside decoding requests too"),
    Exclusive("prefill_chunk_size", "prefill_wait_ms", "prefill_chunk_size holds beside decoding requests too"),
    Exclusive("chunk_beside_decoding", "prefill_wait_ms", "either decides how large a chunk is"),
    Exclusive("use_prefix_caching", "if_fake_compress", "a block with masked tokens cannot be shared", (True,)),
    Exclusive(
        "attention_backend",
        "compress_method",
        "compressed sequences have a kernel of their own",
        ("flash", "planned"),
        advice="leave attention_backend out, or choose sdpa or naive",
    ),
    Exclusive("pack_weights", "quantization", "packing keeps 16-bit weights"),
    Exclusive("adapter", "drafter", "with an adapter the model drafts for itself"),
    Exclusive("adapter", "draft_model", "with an adapter the model drafts for itself"),
    Exclusive("adapter", "kv_cache_dtype", "mask tokens need keys and values of the weights' dtype"),
    *(Exclusive("execution", name, COMPILED) for name in ("adapter", "quantization", "pack_weights")),
    Exclusive("pack_weights", "tensor_parallel_size", "packed matrices are whole"),
)
"""An optimization left to the phase (None) is off beside the other field; one set to True is refused."""


def unmet(config: Any, name: str) -> tuple[str, Any] | None:
    """The first unmet requirement of a field, as in NEEDS; requirements of required fields count too."""
    for other, needed in NEEDS.get(name, ()):
        value = getattr(config, other)
        found = (other, needed) if value not in (needed, None) else None if value else unmet(config, other)
        if found is not None:
            return found
    return None


def check(config: Any) -> None:
    """Raise ConfigError for settings that are each valid but contradict each other."""
    if not 0 < config.p_attn < 1:
        raise ConfigError(f"p_attn is {config.p_attn!r}; it must lie between 0 and 1.")
    if config.layer_upper_budget < config.layer_budget:
        raise ConfigError(
            f"layer_upper_budget is {config.layer_upper_budget} and layer_budget is {config.layer_budget}; the most "
            "that a head keeps cannot be below the least: raise layer_upper_budget too."
        )
    for name in COMPRESSION if config.compress_method is None else ():
        if _is_set(config, name):
            raise ConfigError(
                f"{name} is {getattr(config, name)!r} and compress_method is None; {name}, which arrives in phase "
                f"09.2, is of a compressed KV cache: choose a compress_method too, or leave {name} out."
            )
    for rule in EXCLUSIVE:
        if _is_set(config, rule.name, rule.values) and rule.has_other(config):
            raise ConfigError(
                f"{rule.name} is {getattr(config, rule.name)!r} and {rule.other} is {getattr(config, rule.other)!r}; "
                f"{rule.reason}: {rule.advice}."
            )
    if config.quantize_head and config.quantization is None:
        raise ConfigError(
            "quantize_head is True and quantization is None; choose what the head is rounded to: fp8, int8 or int4."
        )
    if config.draft_ranks > 1 and (config.draft_model is None or config.draft_ranks > config.tensor_parallel_size):
        raise ConfigError(
            f"draft_ranks is {config.draft_ranks}, draft_model is {config.draft_model!r} and tensor_parallel_size is "
            f"{config.tensor_parallel_size}; a draft model is cut among at most as many processes as the model."
        )
    if config.draft_on_each_rank and (config.draft_model is None or config.draft_ranks > 1):
        raise ConfigError(
            f"draft_on_each_rank is True, draft_model is {config.draft_model!r} and draft_ranks is "
            f"{config.draft_ranks}; each process then has all of a draft model: set draft_model, and leave "
            "draft_ranks out."
        )
    has_drafter = config.drafter == "ngram" or config.draft_model is not None or config.adapter is not None
    if config.use_speculative_decoding and not has_drafter:
        raise ConfigError(
            f"use_speculative_decoding is True, drafter is {config.drafter!r} and draft_model is None; set "
            "draft_model to the model that proposes tokens, or choose drafter 'ngram', which needs none."
        )


def _is_set(config: Any, name: str, values: tuple[Any, ...] = ()) -> bool:
    """Whether a field has one of these values or, if none are given, a value other than its default."""
    value = getattr(config, name)
    return value in values if values else bool(value != config.__dataclass_fields__[name].default)

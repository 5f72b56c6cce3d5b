"""The settings that an engine supports: the previous phase's, and its own additions. Introduced in phase 2; a phase
adds its own.

``field=value`` stands for a value that is introduced later than its field. Invariant: each entry is a field of
:class:`shared.engine.config.EngineConfig`, introduced in the phase named there.
"""

MODEL = frozenset({"model", "dtype", "device", "max_seq_len", "seed", "attention_backend"})
PACKED_WEIGHTS = MODEL | {"pack_weights"}
FUSED_KERNELS = PACKED_WEIGHTS | {"attention_backend=flash"}
BATCHES = FUSED_KERNELS | {
    *("max_batch_size", "max_num_batched_tokens", "max_waiting_requests", "kv_cache_backend", "batching_mode"),
}
CONTINUOUS_BATCHING = BATCHES | {"batching_mode=continuous", "scheduler_policy", "max_decode_interval"}
PAGED_MEMORY = CONTINUOUS_BATCHING | {"kv_cache_backend=paged", "block_size", "num_gpu_blocks"}
PLANNED_ATTENTION = PAGED_MEMORY | {"attention_backend=planned"}
CHUNKED_PREFILL = PLANNED_ATTENTION | {
    *("use_chunked_prefill", "prefill_chunk_size", "chunk_beside_decoding", "prefill_wait_ms"),
    "max_prefill_chunks_per_step",
}
PREFIX_CACHING = CHUNKED_PREFILL | {"use_prefix_caching"}
OVERLAPPED_STEPS = PREFIX_CACHING | {"use_cuda_graphs", "overlap_scheduling"}
QUANTIZATION = OVERLAPPED_STEPS | {"kv_cache_dtype", "quantization", "quantize_head"}
SPECULATION = QUANTIZATION | {
    *("use_speculative_decoding", "drafter", "draft_model", "spec_length", "acceptance_method", "adapt_spec_length"),
}
GRAMMARS = SPECULATION | {"grammar_pool_bytes"}

# Side tracks.
COMPRESSION = OVERLAPPED_STEPS | {
    *("compress_method", "if_fake_compress", "if_log_compress", "if_log_num_topp", "layer_budget"),
    *("layer_upper_budget", "query_window_size", "steps_between_compressions", "p_attn", "attn_reduce_method"),
}
MULTI_TOKEN = SPECULATION | {"adapter", "execution"}
RANKS = GRAMMARS | {"tensor_parallel_size", "all_reduce_backend", "draft_ranks", "draft_on_each_rank"}

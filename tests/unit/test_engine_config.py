"""Settings: ranges, choices, contradictions, and the phase that brings each."""

import dataclasses
import itertools

import pytest

from shared.engine.config import SIDE_TRACKS, EngineConfig
from shared.errors import ConfigError

FIELDS = {field.name: field for field in dataclasses.fields(EngineConfig)}
CHOICES = {name: field.metadata["choices"] for name, field in FIELDS.items() if field.metadata["choices"]}
COUNTS = [name for name, field in FIELDS.items() if field.type in (int, int | None)]
COUNTS = [name for name in COUNTS if name not in ("max_seq_len", "seed")]  # the model's length, and any number
SLOTS, STATIC, WHOLE = {"kv_cache_backend": "contiguous"}, {"batching_mode": "static"}, {"use_chunked_prefill": False}

ADAPTER = {"adapter": "a", "use_speculative_decoding": True}
NGRAM = {"drafter": "ngram", "use_speculative_decoding": True}
SNAPKV = {"compress_method": "snapkv"}
CHUNKS = ("prefill_chunk_size", "chunk_beside_decoding", "prefill_wait_ms")
OF_DRAFTS = {"drafter": "ngram", "draft_model": "small", "adapter": "a", "spec_length": 2, "adapt_spec_length": True}
OF_DRAFTS |= {"acceptance_method": "rejection"}
OF_COMPRESSION = {"if_fake_compress": True, "if_log_compress": True, "if_log_num_topp": True, "layer_budget": 64}
OF_COMPRESSION |= {"layer_upper_budget": 4096, "query_window_size": 64, "steps_between_compressions": 64}
OF_COMPRESSION |= {"p_attn": 0.5, "attn_reduce_method": "max"}
COMPILE, INT8, PACKED = {"execution": "compile"}, {"quantization": "int8"}, {"pack_weights": True}


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_is_a_whole_number_of_at_least_its_minimum(name: str) -> None:
    least = FIELDS[name].metadata["at_least"]
    if least == 0:
        assert getattr(EngineConfig(**{name: 0}), name) == 0
    for value in (least - 1, 2.0, True, "8"):
        with pytest.raises(ConfigError, match=f"^{name} is {value!r}; it must be an integer of at least {least}"):
            EngineConfig(**{name: value})


@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_is_one_of_those_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is 'other'; it must be one of {CHOICES[name][0]}, "):
        EngineConfig(**{name: "other"})
    if FIELDS[name].default is not None:
        with pytest.raises(ConfigError, match=f"^{name} is None; it must be one of"):
            EngineConfig(**{name: None})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (SLOTS | {"use_prefix_caching": True}, "use_prefix_caching is True and kv_cache_backend is 'contiguous'"),
        (WHOLE | {"use_prefix_caching": True}, "use_prefix_caching is True and use_chunked_prefill is False"),
        (STATIC | {"use_prefix_caching": True}, "use_prefix_caching is True and batching_mode is 'static'"),
        (SLOTS | {"block_size": 32}, "requires kv_cache_backend = 'paged'"),
        (SLOTS | {"num_gpu_blocks": 5}, "num_gpu_blocks is 5 and kv_cache_backend is 'contiguous'"),
        (WHOLE | {"prefill_chunk_size": 64}, "True: set that too .--chunked-prefill., or leave prefill_chunk_size out"),
        *(
            (WHOLE | {name: 2}, f"{name} is 2 and use_chunked_prefill is False")
            for name in (*CHUNKS, "max_prefill_chunks_per_step")
        ),
        *(({one: 8, other: 8}, f"{one} is 8 and {other} is 8") for one, other in itertools.combinations(CHUNKS, 2)),
        *(({name: value}, f"{name} is {value!r} and use_sp.* is False; .*True:") for name, value in OF_DRAFTS.items()),
        *((COMPILE | other, "is 'compile' and .* plain weights") for other in (ADAPTER, INT8, PACKED)),
        (PACKED | INT8, "pack_weights is True and quantization is 'int8'; packing keeps 16-bit weights"),
        (SLOTS | {"kv_cache_dtype": "fp8"}, "kv_cache_dtype is 'fp8' and kv_cache_backend is 'contiguous'"),
        ({"use_speculative_decoding": True}, "draft_model is None; set draft_model to the model that proposes"),
        (STATIC | {"scheduler_policy": "prefill_first"}, "requires batching_mode = 'continuous'"),
        (STATIC | {"max_decode_interval": 2}, "max_decode_interval is 2 and batching_mode is 'static'"),
        (STATIC | {"use_chunked_prefill": True}, "use_chunked_prefill, which arrives in phase 07, requires"),
        (SLOTS | {"attention_backend": "planned"}, "planned attention works on blocks"),
        *(
            (other | {"use_cuda_graphs": True}, f"use_cuda_graphs is True and {name} is '{value}'")
            for other in (STATIC, SLOTS, {"attention_backend": "sdpa"})
            for name, value in other.items()
        ),
        (NGRAM | STATIC, "requires batching_mode = 'continuous'"),
        (NGRAM | {"draft_model": "small"}, "draft_model is 'small' and drafter is 'ngram'"),
        ({"drafter": "ngram"}, "drafter is 'ngram' and use_speculative_decoding is False; .*--speculative-decoding"),
        (NGRAM | {"adapter": "a"}, "adapter is 'a' and drafter is 'ngram'; with an adapter the model drafts"),
        (ADAPTER | {"kv_cache_dtype": "fp8"}, "keys and values of the weights' dtype"),
        (ADAPTER | SLOTS, "requires kv_cache_backend = 'paged'"),
        (ADAPTER | {"draft_model": "small"}, "adapter is 'a' and draft_model is 'small'; with an adapter"),
        *((SNAPKV | {"p_attn": share}, f"p_attn is {share}; it must lie between 0 and 1") for share in (0, 1)),
        *(({"seed": seed}, f"seed is {seed}; it must lie between 0 and 2.64 - 1") for seed in (-1, 2**64)),
        *(
            ({name: value}, f"{name} is {value!r} and compress_method is None")
            for name, value in OF_COMPRESSION.items()
        ),
        ({"if_fake_compress": True}, "choose a compress_method too, or leave if_fake_compress out"),
        (SNAPKV | {"layer_budget": 4096}, "layer_upper_budget is 2048 and layer_budget is 4096"),
        (SNAPKV | {"if_fake_compress": True, "use_prefix_caching": True}, "cannot be shared"),
        *((SNAPKV | {"attention_backend": name}, "leave attention_backend out") for name in ("flash", "planned")),
        (SNAPKV | WHOLE, "requires use_chunked_prefill = True"),
        (SNAPKV | SLOTS, "requires kv_cache_backend = 'paged': set that too .--kv-cache-backend paged."),
        ({"max_seq_len": 1}, "max_seq_len is 1; it must be at least 2"),
    ],
)
def test_contradictions_are_refused_with_the_rule(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings)


def test_what_belongs_together_may_be_set_together() -> None:
    EngineConfig(kv_cache_backend="paged", block_size=32, num_gpu_blocks=5, use_prefix_caching=True)
    EngineConfig(block_size=32, num_gpu_blocks=5, use_prefix_caching=True)  # the backend is the phase's own
    EngineConfig(use_chunked_prefill=True, prefill_chunk_size=64, max_prefill_chunks_per_step=2)
    EngineConfig(use_speculative_decoding=True, draft_model="small", spec_length=2)
    EngineConfig(batching_mode="continuous", scheduler_policy="prefill_first", max_decode_interval=2)
    EngineConfig(prefill_chunk_size=64, max_prefill_chunks_per_step=2)  # so is whether prompts are cut
    EngineConfig(**SLOTS, **STATIC).check({*SLOTS, *STATIC})  # there from the start
    EngineConfig(compress_method="snapkv", layer_budget=64, layer_upper_budget=64)
    EngineConfig(compress_method="snapkv", attention_backend="sdpa")  # other backends are excluded
    EngineConfig(compress_method="snapkv", if_fake_compress=True, use_prefix_caching=False)
    EngineConfig(quantization="int8", quantize_head=True)
    EngineConfig(use_speculative_decoding=True, draft_model="small", tensor_parallel_size=2, draft_ranks=2)
    EngineConfig(**SNAPKV, attention_backend="naive", seed=2**64 - 1)
    config = EngineConfig(max_seq_len=100, max_batch_size=3, max_num_batched_tokens=40)
    assert config.sequence_limit(100) == 100
    assert (config.most_tokens_of_a_step(100), config.most_tokens_of_a_step(20)) == (103, 43)


OPTIONAL = {
    "use_chunked_prefill": ({"batching_mode": "continuous"}, {"batching_mode": "static"}),
    "use_prefix_caching": ({"kv_cache_backend": "paged"}, {"kv_cache_backend": "contiguous"}),
    "use_cuda_graphs": ({}, None),
}
"""Optimizations that are left to the phase, each with settings that it needs, and with settings that rule it out."""


@pytest.mark.parametrize("name", OPTIONAL)
def test_an_optimization_that_is_left_to_the_phase_is_on_where_it_can_be(name: str) -> None:
    there, missing = OPTIONAL[name]
    assert getattr(EngineConfig(), name) is None
    assert EngineConfig().is_on(name)
    assert EngineConfig(**there).is_on(name)
    assert EngineConfig(**there, **{name: True}).is_on(name)
    assert not EngineConfig(**there, **{name: False}).is_on(name)
    if missing is not None:
        assert not EngineConfig(**missing).is_on(name)
        assert not EngineConfig(**missing, **{name: False}).is_on(name), "what is off needs nothing"
        with pytest.raises(ConfigError, match=f"{name} is True and"):
            EngineConfig(**missing, **{name: True})


@pytest.mark.parametrize("name", OPTIONAL)
def test_an_earlier_phase_refuses_an_optimization_only_where_it_is_asked_for(name: str) -> None:
    for value in (None, False):
        EngineConfig(**{name: value}).check(set())
    with pytest.raises(ConfigError, match=f"{name} = True arrives in phase .*; leave it out, or choose"):
        EngineConfig(**{name: True}).check(set())
    EngineConfig(**{name: True}).check({name})


@pytest.mark.parametrize("is_side_track", [False, True])
def test_a_refusal_names_the_phases_that_have_the_setting(is_side_track: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No later phase has what a side track brings."""
    phase = FIELDS["use_cuda_graphs"].metadata["phase"]
    assert phase not in SIDE_TRACKS
    if is_side_track:
        monkeypatch.setattr("shared.engine.config.SIDE_TRACKS", (phase,))
    with pytest.raises(ConfigError) as refusal:
        EngineConfig(use_cuda_graphs=True).check(set())
    which = "that phase" if is_side_track else "that phase or a later one"
    assert str(refusal.value).endswith(f"leave it out, or choose {which} with --phase.")

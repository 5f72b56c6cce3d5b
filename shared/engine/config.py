"""The settings of an engine: one frozen dataclass that grows by phase. Introduced in phase 2.

Every optimization is a field that can be turned off. A field knows the phase that brings it, so an engine refuses the
settings of later phases by name. Invariant: a config that exists is consistent; contradictions are refused when it is
made, with the rule in the message.
"""

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shared.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")
ATTENTION_BACKENDS = ("naive", "sdpa", "flash", "planned")
DEFAULT_MAX_SEQ_LEN = 4096
KV_CACHE_BACKENDS = ("contiguous", "paged")
BATCHING_MODES = ("static", "continuous")
SCHEDULER_POLICIES = ("fcfs", "prefill_first", "decode_round_robin")
QUANTIZATIONS = ("fp8", "int8")

CHOICES = {
    "dtype": DTYPES,
    "attention_backend": ATTENTION_BACKENDS,
    "kv_cache_backend": KV_CACHE_BACKENDS,
    "batching_mode": BATCHING_MODES,
    "scheduler_policy": SCHEDULER_POLICIES,
    "quantization": QUANTIZATIONS,
}
"""The values of the fields that name one of a few; None is allowed where it is the default."""

COUNTS = (
    "max_batch_size",
    "max_num_batched_tokens",
    "max_waiting_requests",
    "max_decode_interval",
    "block_size",
    "num_gpu_blocks",
    "prefill_chunk_size",
    "max_prefill_chunks_per_step",
    "spec_length",
)
"""The fields that are whole numbers of at least 1; None is allowed where it is the default."""

NEEDS = {
    "block_size": ("kv_cache_backend", "paged"),
    "num_gpu_blocks": ("kv_cache_backend", "paged"),
    "prefill_chunk_size": ("use_chunked_prefill", True),
    "max_prefill_chunks_per_step": ("use_chunked_prefill", True),
    "use_chunked_prefill": ("batching_mode", "continuous"),
    "use_prefix_caching": ("kv_cache_backend", "paged"),
    "draft_model": ("use_speculative_decoding", True),
    "spec_length": ("use_speculative_decoding", True),
}
"""Fields that mean something only with another: changed, they need that field to have that value. An optimization that
is left to the phase (None) is off where it lacks what it needs, and only refused where it is asked for (True)."""

SIDE_TRACKS = ("09.1", "09.2", "11.1", "12.1")
"""Phases whose settings no later phase has."""


def setting(default: Any, phase: str, text: str, values: Mapping[Any, str] | None = None) -> Any:
    """A field of the config.

    Args:
        default: the value that every engine knows.
        phase: the phase that brings the field.
        text: one line on what it does.
        values: values that a later phase brings, with that phase.
    """
    return dataclasses.field(default=default, metadata={"phase": phase, "help": text, "values": values or {}})


@dataclass(frozen=True)
class EngineConfig:
    """How an engine runs its model. Raises ConfigError on values that make no sense."""

    model: str = setting("smollm2-135m", "02", "a model folder, a known name, or a hub name")
    dtype: str | None = setting(None, "02", "dtype of the weights: float32, bfloat16, float16; default by device")
    device: str = setting("cpu", "02", "cpu or cuda")
    max_seq_len: int | None = setting(None, "02", "most tokens of prompt and answer; default: the model's, up to 4096")
    seed: int | None = setting(None, "02", "where requests without a seed get theirs from; default: the system")
    attention_backend: str | None = setting(
        None,
        "02",
        "naive (the formula), sdpa (PyTorch), flash (our kernels) or planned (our kernels, after a plan of the step); "
        "default: on a GPU the last of them that the phase has, else sdpa",
        values={"flash": "03.1", "planned": "06.1"},
    )

    pack_weights: bool = setting(False, "03", "CPU: keep 16-bit weights 16 bits wide; slower to load, faster to decode")

    max_batch_size: int = setting(16, "04", "most requests that run at a time, each with memory of its own")
    max_num_batched_tokens: int = setting(
        8192, "04", "most prompt tokens of a step; a longer prompt has a step of its own"
    )
    max_waiting_requests: int = setting(1024, "04", "most requests in the queue; more are refused")
    kv_cache_backend: str | None = setting(
        None, "04", "contiguous: a region a request; paged: blocks; default: the phase's own", values={"paged": "06"}
    )
    batching_mode: str | None = setting(
        None,
        "04",
        "static: a batch runs to its end before the next; continuous: a request joins as soon as there is room; "
        "default: the phase's own",
        values={"continuous": "05"},
    )

    scheduler_policy: str = setting(
        "fcfs", "05", "who decodes while prompts are run: fcfs, prefill_first, decode_round_robin"
    )
    max_decode_interval: int = setting(4, "05", "every decoding request gets a token at least once in so many steps")

    block_size: int = setting(16, "06", "tokens of a block")
    num_gpu_blocks: int | None = setting(None, "06", "blocks of the pool; default: what memory is left")
    use_chunked_prefill: bool | None = setting(
        None, "07", "run long prompts in chunks, beside the decoding of others; default: the phase's own"
    )
    prefill_chunk_size: int = setting(512, "07", "most tokens of such a chunk")
    max_prefill_chunks_per_step: int = setting(1, "07", "most such chunks of a step")
    use_prefix_caching: bool | None = setting(
        None, "08", "requests that begin alike share blocks; default: the phase's own"
    )
    use_cuda_graphs: bool | None = setting(
        None, "09", "replay a decode step as one CUDA graph; default: the phase's own"
    )
    quantization: str | None = setting(None, "10", "fp8 or int8 weights")
    use_speculative_decoding: bool = setting(False, "11", "a draft model proposes tokens, the model verifies them")
    draft_model: str | None = setting(None, "11", "the model that proposes: a folder, a known name, or a hub name")
    spec_length: int = setting(4, "11", "tokens proposed at a time")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            is_default = value == field.default and type(value) is type(field.default)  # True is not 1 here
            if field.name in CHOICES and not is_default and value not in CHOICES[field.name]:
                raise ConfigError(f"{field.name} is {value!r}; it must be one of {', '.join(CHOICES[field.name])}.")
            if field.name in COUNTS and not is_default and (type(value) is not int or value < 1):
                raise ConfigError(f"{field.name} is {value!r}; it must be a whole number of at least 1.")
            other, needed = NEEDS.get(field.name, (field.name, value))
            if not is_default and value is not False and getattr(self, other) not in (needed, None):
                raise ConfigError(
                    f"{field.name} is {value!r} and {other} is {getattr(self, other)!r}; the first, which arrives in "
                    f"phase {field.metadata['phase']}, has a meaning only with {other} = {needed!r}: set that too, or "
                    f"leave {field.name} out."
                )
        self._check_contradictions()
        if self.max_seq_len is not None and self.max_seq_len < 2:
            raise ConfigError(
                f"max_seq_len is {self.max_seq_len}; it must be at least 2: a token of prompt and one of answer."
            )
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise ConfigError(f"seed is {self.seed}; it must lie between 0 and 2^64 - 1.")

    def _check_contradictions(self) -> None:
        """Raise ConfigError for settings of which each is right and which cannot be had together."""
        if self.batching_mode == "static":
            for name in ("scheduler_policy", "max_decode_interval"):
                value = getattr(self, name)
                if value != self.__dataclass_fields__[name].default:
                    raise ConfigError(
                        f"{name} is {value!r} and batching_mode is 'static'; a static batch admits nobody while it "
                        f"runs, so there is nothing to share out: leave {name} out, or choose batching_mode "
                        "'continuous'."
                    )
        if self.attention_backend == "planned" and self.kv_cache_backend == "contiguous":
            raise ConfigError(
                "attention_backend is 'planned' and kv_cache_backend is 'contiguous'; what is planned is attention "
                "over blocks: leave attention_backend out, or choose kv_cache_backend 'paged'."
            )
        if self.use_speculative_decoding and self.draft_model is None:
            raise ConfigError(
                "use_speculative_decoding is True and draft_model is None; name the model that proposes tokens with "
                "draft_model."
            )

    def check(self, supported: Collection[str]) -> None:
        """Refuse every setting that was changed and that the engine, an earlier phase, does not have.

        Args:
            supported: names of fields; and ``field=value`` for each value that came later than its field.
        """
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            is_default = value == field.default or (value is False and field.default is None)
            phase = field.metadata["phase"] if field.name not in supported and not is_default else None
            if f"{field.name}={value}" not in supported:
                phase = field.metadata["values"].get(value, phase)
            if phase is not None:
                usual = "out" if field.default is None else f"at {field.default!r}"
                which = "that phase" if phase in SIDE_TRACKS else "that phase or a later one"
                raise ConfigError(
                    f"{field.name} = {value!r} arrives in phase {phase}; leave it {usual}, or choose {which} with "
                    "--phase."
                )

    def is_on(self, name: str) -> bool:
        """Whether an optimization that the phase has is on: as it was set; left out, if what it needs is there."""
        other, needed = NEEDS.get(name, (name, None))
        value = getattr(self, name)
        return bool(value) if value is not None else getattr(self, other) in (needed, None)

    def most_tokens_of_a_step(self, max_seq_len: int) -> int:
        """The most new tokens that a forward can bring, where a sequence may have ``max_seq_len``."""
        return max(self.max_num_batched_tokens, self.max_batch_size, max_seq_len)

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """The dtype of the weights, or None to choose by device."""
        return None if self.dtype is None else getattr(torch, self.dtype)

    def sequence_limit(self, model_limit: int) -> int:
        """Tokens that one request may have, prompt and answer together, with a model of ``model_limit`` positions."""
        if self.max_seq_len is None:
            return min(model_limit, DEFAULT_MAX_SEQ_LEN)
        if self.max_seq_len > model_limit:
            raise ConfigError(
                f"max_seq_len is {self.max_seq_len} and the model was made for {model_limit} positions; ask for at "
                "most that."
            )
        return self.max_seq_len

"""The settings of an engine: one frozen dataclass that grows by phase. Introduced in phase 2.

Every optimization is a field that can be turned off. A field's metadata names the phase that introduces it, so that an
engine can refuse the settings of later phases by name. It also holds the help text, from which the command line makes
an option (:mod:`shared.cli.options`; its help must appear without importing torch, hence the late import). Invariant:
every EngineConfig is consistent; the constructor refuses contradictions, by the rules of
:mod:`shared.engine.config_rules`.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shared.engine.config_rules import EXCLUSIVE, check, unmet
from shared.errors import ConfigError

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16", "float16")
BATCHING_MODES = ("static", "continuous")
KV_CACHE_BACKENDS = ("contiguous", "paged")
SCHEDULER_POLICIES = ("fcfs", "prefill_first", "decode_round_robin")
ACCEPTANCE_METHODS = ("coupled", "rejection")
COMPRESS_METHODS = ("snapkv", "rkv", "topp", "streaming", "none")
ATTN_REDUCE_METHODS = ("mean", "raw", "sum", "max")
KV_CACHE_DTYPES = ["auto", "fp8"]
"""The names of the storages of keys and values, which `shared.cache.view.storages` has as a table."""
DEFAULT_MAX_SEQ_LEN = 4096

SIDE_TRACKS = ("09.1", "09.2", "11.1", "12.1")
"""Side tracks: no later phase supports their settings."""


def setting(
    default: Any,
    phase: str,
    text: str,
    *,
    choices: Sequence[str] = (),
    values: Mapping[Any, str] | None = None,
    at_least: int | None = None,
) -> Any:
    """A field of the config.

    Args:
        default: the value that every engine accepts.
        phase: the phase that introduces the field.
        text: what the field does; the help of its option.
        choices: the values of a field with a fixed set of values; None is allowed if it is the default.
        values: the choices that a later phase introduces, each with that phase.
        at_least: the minimum of a field that is a whole number; None is allowed if it is the default.
    """
    metadata = {"phase": phase, "help": text, "choices": choices, "values": values or {}, "at_least": at_least}
    return dataclasses.field(default=default, metadata=metadata)


def option_name(field: str) -> str:
    """The name of a field's command-line option, without the prefix ``use_``."""
    return "--" + field.removeprefix("use_").replace("_", "-")


@dataclass(frozen=True)
class EngineConfig:
    """How an engine runs its model. Raises ConfigError for values out of range and for contradictions."""

    model: str = setting("smollm2-135m", "02", "A model folder, a known name, or a hub name owner/name.")
    dtype: str | None = setting(
        None,
        "02",
        "Dtype of the weights: float32, bfloat16 or float16; default: float32 on a CPU, otherwise the checkpoint's.",
        choices=DTYPES,
    )
    device: str = setting(
        "cpu", "02", "cpu, cuda, or auto: a GPU if there is one that can run the kernels, otherwise cpu."
    )
    max_seq_len: int | None = setting(
        None, "02", "Maximum tokens of prompt and output; default: the model's limit, up to 4096."
    )
    seed: int | None = setting(None, "02", "Seed for requests without their own; default: a random one.")
    attention_backend: str | None = setting(
        None,
        "02",
        "naive (the formula), sdpa (PyTorch), flash (our kernels) or planned (our kernels, with work planned for each "
        "step); default: the last that the phase has on a GPU, sdpa on a CPU.",
        choices=("naive", "sdpa", "flash", "planned"),
        values={"flash": "03.1", "planned": "06.1"},
    )

    pack_weights: bool = setting(
        False, "03", "On a CPU, keep 16-bit weights 16 bits wide: slower to load, faster to decode."
    )

    max_batch_size: int = setting(16, "04", "Maximum number of running requests.", at_least=1)
    max_num_batched_tokens: int = setting(
        8192,
        "04",
        "Maximum prompt tokens in a step, in chunks decoding ones included; a longer whole prompt runs alone.",
        at_least=1,
    )
    max_waiting_requests: int = setting(1024, "04", "Maximum queue length; further requests are refused.", at_least=1)
    kv_cache_backend: str | None = setting(
        None,
        "04",
        "contiguous (one region per request) or paged (blocks); default: the phase's own.",
        choices=KV_CACHE_BACKENDS,
        values={"paged": "06"},
    )
    batching_mode: str | None = setting(
        None,
        "04",
        "static (a batch runs to its end before the next) or continuous (requests join and leave in every step); "
        "default: the phase's own.",
        choices=BATCHING_MODES,
        values={"continuous": "05"},
    )

    scheduler_policy: str = setting(
        "fcfs",
        "05",
        "Which requests decode in a step with prefills: fcfs, prefill_first or decode_round_robin.",
        choices=SCHEDULER_POLICIES,
    )
    max_decode_interval: int = setting(4, "05", "Maximum steps between two tokens of a decoding request.", at_least=1)

    block_size: int = setting(16, "06", "Tokens in a KV cache block.", at_least=1)
    num_gpu_blocks: int | None = setting(
        None, "06", "KV cache blocks in the pool, on any device; default: as many as fit in free memory.", at_least=1
    )
    use_chunked_prefill: bool | None = setting(
        None, "07", "Prefill long prompts in chunks, mixed with decoding; default: the phase's own."
    )
    prefill_chunk_size: int | None = setting(
        None,
        "07",
        "Maximum tokens in a prefill chunk; default: 512 alongside decoding requests, about 4096 a step while none "
        "decodes.",
        at_least=1,
    )
    chunk_beside_decoding: int | None = setting(
        None, "07", "Maximum tokens in a prefill chunk alongside decoding requests; default: 512.", at_least=1
    )
    prefill_wait_ms: int | None = setting(
        None,
        "07",
        "Milliseconds that a step with one chunk may keep decoding requests waiting, by the table of step costs, in "
        "place of chunk_beside_decoding.",
        at_least=1,
    )
    max_prefill_chunks_per_step: int | None = setting(
        None, "07", "Maximum prefill chunks in a step; default: as many as the step's tokens allow.", at_least=1
    )
    use_prefix_caching: bool | None = setting(
        None, "08", "Share the blocks of common prompt prefixes; default: the phase's own."
    )
    use_cuda_graphs: bool | None = setting(
        None, "09", "Replay steps as CUDA graphs, captured at start-up; default: on with a GPU."
    )
    overlap_scheduling: bool | None = setting(
        None, "09", "Plan and launch a step while the previous one runs; default: on with CUDA graphs."
    )
    compress_method: str | None = setting(
        None,
        "09.2",
        "Which keys a compressed KV cache keeps: snapkv, rkv, topp, streaming (the newest) or none (all); default: no "
        "compression.",
        choices=COMPRESS_METHODS,
    )
    if_fake_compress: bool = setting(False, "09.2", "Mask dropped keys instead of moving the others together.")
    if_log_compress: bool = setting(
        False, "09.2", "Log each compression: the share that is kept, and the blocks freed."
    )
    if_log_num_topp: bool = setting(False, "09.2", "Log how many tokens each KV head of each layer keeps.")
    layer_budget: int = setting(1024, "09.2", "Minimum number of tokens that a KV head keeps.", at_least=1)
    layer_upper_budget: int = setting(
        2048, "09.2", "Maximum number of tokens that a KV head keeps at a compression.", at_least=1
    )
    query_window_size: int = setting(
        128, "09.2", "How many of the last queries determine which keys matter.", at_least=1
    )
    steps_between_compressions: int = setting(128, "09.2", "Tokens between two compressions.", at_least=1)
    p_attn: float = setting(0.9, "09.2", "Share of a head's attention that the kept keys must have, between 0 and 1.")
    attn_reduce_method: str = setting(
        "mean",
        "09.2",
        "How the window's attention is reduced to count the keys that a head needs: mean, raw, sum or max.",
        choices=ATTN_REDUCE_METHODS,
    )
    kv_cache_dtype: str = setting(
        "auto",
        "10",
        "Dtype of keys and values: auto (the weights') or fp8 (e4m3, half the bytes of 16 bits).",
        choices=KV_CACHE_DTYPES,
    )
    quantization: str | None = setting(
        None,
        "10",
        "Round the weights to fp8, int8 or int4 as they load; default: as in the checkpoint.",
        choices=("fp8", "int8", "int4"),
    )
    quantize_head: bool = setting(False, "10", "Round the output head too.")
    use_speculative_decoding: bool = setting(False, "11", "A drafter proposes tokens, and the model verifies them.")
    drafter: str | None = setting(
        None,
        "11",
        "Drafter of speculative decoding: ngram (tokens that followed the same words earlier); default: model, the "
        "draft model.",
        choices=("model", "ngram"),
    )
    draft_model: str | None = setting(
        None, "11", "The draft model: a folder, a known name, or a hub name; default: none."
    )
    spec_length: int = setting(5, "11", "Maximum draft tokens of a request in a step.", at_least=1)
    acceptance_method: str = setting(
        "coupled",
        "11",
        "coupled (drafts are kept as long as they equal the model's own samples, so no token changes) or rejection "
        "(more drafts are kept, and only the distribution of the tokens stays the same).",
        choices=ACCEPTANCE_METHODS,
    )
    adapt_spec_length: bool | None = setting(
        None, "11", "Propose fewer tokens where few are accepted; default: on with speculative decoding."
    )
    adapter: str | None = setting(
        None, "11.1", "Folder of an adapter that lets the model draft for itself; default: none."
    )
    execution: str = setting(
        "kernels",
        "11.1",
        "kernels (ours) or compile (PyTorch compiles everything between attention layers, which takes a while).",
        choices=("kernels", "compile"),
    )
    grammar_pool_bytes: int = setting(
        256_000_000,
        "12",
        "GPU memory in bytes for the grammars of running requests; if a grammar does not fit, its masks come from "
        "the CPU.",
        at_least=0,
    )
    tensor_parallel_size: int = setting(
        1, "12.1", "Number of processes, each with a device, over which the model is sharded.", at_least=1
    )
    draft_ranks: int = setting(
        1, "12.1", "Number of processes over which the draft model is sharded; 1: the first has all of it.", at_least=1
    )
    draft_on_each_rank: bool = setting(
        False, "12.1", "Each process holds and computes the whole draft model; by default only the first does."
    )
    all_reduce_backend: str | None = setting(
        None,
        "12.1",
        "On GPUs: peer (small sums by our kernel, through memory that the GPUs share) or nccl; default: peer, or nccl "
        "if they cannot.",
        choices=("peer", "nccl"),
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            is_default = value == field.default and type(value) is type(field.default)  # True does not count as 1 here
            choices, at_least = field.metadata["choices"], field.metadata["at_least"]
            if choices and not is_default and value not in choices:
                raise ConfigError(f"{field.name} is {value!r}; it must be one of {', '.join(choices)}.")
            if at_least is not None and not is_default and (type(value) is not int or value < at_least):
                raise ConfigError(f"{field.name} is {value!r}; it must be an integer of at least {at_least}.")
            missing = None if is_default or value is False else unmet(self, field.name)
            if missing is not None:
                other, needed = missing
                asked = option_name(other) if needed is True else f"{option_name(other)} {needed}"
                raise ConfigError(
                    f"{field.name} is {value!r} and {other} is {getattr(self, other)!r}; {field.name}, which arrives "
                    f"in phase {field.metadata['phase']}, requires {other} = {needed!r}: set that too ({asked}), or "
                    f"leave {field.name} out."
                )
        check(self)
        if self.max_seq_len is not None and self.max_seq_len < 2:
            raise ConfigError(
                f"max_seq_len is {self.max_seq_len}; it must be at least 2: one prompt token and one output token."
            )
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise ConfigError(f"seed is {self.seed}; it must lie between 0 and 2^64 - 1.")

    def check(self, supported: Collection[str]) -> None:
        """Raise ConfigError for a changed setting that the engine does not support, and name its phase.

        Args:
            supported: names of fields, and ``field=value`` for each value introduced later than its field.
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
        """Whether an optimization that the phase supports is on; None means on if its requirements are met."""
        value = getattr(self, name)
        if value is not None:
            return bool(value)
        return unmet(self, name) is None and not any(rule.name == name and rule.has_other(self) for rule in EXCLUSIVE)

    def most_tokens_of_a_step(self, max_seq_len: int) -> int:
        """The maximum number of new tokens in a forward, for sequences of up to ``max_seq_len`` tokens."""
        most = max(self.max_num_batched_tokens, max_seq_len) + self.max_batch_size  # prompts, plus decoding requests
        return min(most, self.max_batch_size * max_seq_len)

    @property
    def most_logit_rows(self) -> int:
        """The maximum number of tokens sampled for a request in a step."""
        return 1 + self.spec_length if self.use_speculative_decoding else 1

    @property
    def torch_dtype(self) -> "torch.dtype | None":
        """The dtype of the weights; None: choose by device."""
        import torch

        return None if self.dtype is None else getattr(torch, self.dtype)

    def sequence_limit(self, model_limit: int) -> int:
        """Maximum tokens of a request, prompt and output, with a model of ``model_limit`` positions."""
        if self.max_seq_len is None:
            return min(model_limit, DEFAULT_MAX_SEQ_LEN)
        if self.max_seq_len > model_limit:
            raise ConfigError(
                f"max_seq_len is {self.max_seq_len} and the model supports {model_limit} positions; set at most "
                f"{model_limit}."
            )
        return self.max_seq_len

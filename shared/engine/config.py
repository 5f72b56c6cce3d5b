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
ATTENTION_BACKENDS = ("naive", "sdpa", "flash")
DEFAULT_MAX_SEQ_LEN = 4096


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
        "naive (the formula), sdpa (PyTorch) or flash (our kernel); default: flash on a GPU where the phase has it",
        values={"flash": "03.1"},
    )

    pack_weights: bool = setting(False, "03", "CPU: keep 16-bit weights 16 bits wide; slower to load, faster to decode")

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError(f"dtype is {self.dtype!r}; it must be one of {', '.join(DTYPES)}.")
        if self.attention_backend not in (None, *ATTENTION_BACKENDS):
            raise ConfigError(
                f"attention_backend is {self.attention_backend!r}; it must be one of {', '.join(ATTENTION_BACKENDS)}."
            )
        if self.max_seq_len is not None and self.max_seq_len < 2:
            raise ConfigError(
                f"max_seq_len is {self.max_seq_len}; it must be at least 2: a token of prompt and one of answer."
            )
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise ConfigError(f"seed is {self.seed}; it must lie between 0 and 2^64 - 1.")

    def check(self, supported: Collection[str]) -> None:
        """Refuse every setting that was changed and that the engine, an earlier phase, does not have.

        Args:
            supported: names of fields; and ``field=value`` for each value that came later than its field.
        """
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            phase = field.metadata["phase"] if field.name not in supported and value != field.default else None
            if f"{field.name}={value}" not in supported:
                phase = phase or field.metadata["values"].get(value)
            if phase is not None:
                usual = "out" if field.default is None else f"at {field.default!r}"
                raise ConfigError(
                    f"{field.name} = {value!r} arrives in phase {phase}; leave it {usual}, or choose that phase or a "
                    "later one with --phase."
                )

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

"""The time of an engine's step, as a formula with measured coefficients. Follows phase 11.

A step reads the weights once and computes its tokens, each of which attends to the keys before it. Invariant: the time
is linear in each of these counts, so the time of many steps of the same requests has a closed form.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from shared.errors import ConfigError


@dataclass(frozen=True)
class StepTimes:
    """Seconds per step, and per unit of what it computes."""

    step: float
    prefill_step: float
    """Additional time of a step with prompts: a GPU replays no graph then."""
    prefill_token: float
    prefill_key: float
    """Time for each pair of a prompt's token and a key that the token attends to."""
    decode_row: float
    decode_key: float
    """Time for each key that a decoding request attends to."""
    request: float = 0.0
    """Time of a request outside the engine, before its first token: HTTP, the router, the text."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
                raise ConfigError(f"The step time {name} is {value}; it must be a number of seconds from 0 on.")
        if self.step == 0:
            raise ConfigError("The step time step is 0; a step that computes nothing else must take some time.")

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Self:
        """From the table ``results.step_times`` of a report; raises ConfigError if a coefficient is missing."""
        names = [field.name for field in fields(cls)]
        if missing := [name for name in names[:-1] if name not in found]:
            raise ConfigError(f"The step times lack {', '.join(missing)}; they need {', '.join(names)}.")
        return cls(**{name: found[name] for name in names if name in found})

    def prefill(self, num_tokens: int, start: int) -> float:
        """Seconds that a chunk of a prompt adds to a step; ``start`` tokens of the prompt are in the KV cache."""
        return num_tokens * self.prefill_token + self.prefill_key * num_tokens * (start + (num_tokens + 1) / 2)

    def decode(self, num_rows: int, num_keys: int, num_steps: int = 1) -> float:
        """The duration of steps that only decode the same requests; the first attends to ``num_keys`` keys, and each
        later step to one more key per request.
        """
        first = self.step + num_rows * self.decode_row + num_keys * self.decode_key
        return num_steps * (first + num_rows * self.decode_key * (num_steps - 1) / 2)

    def steps_within(self, seconds: float, num_rows: int, num_keys: int, most: int) -> int:
        """The smallest number of those steps that takes at least ``seconds``, from 1 to ``most``."""
        low, high = 1, most
        while low < high:
            middle = (low + high) // 2
            if self.decode(num_rows, num_keys, middle) >= seconds:
                high = middle
            else:
                low = middle + 1
        return low

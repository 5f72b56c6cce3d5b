"""The sampling parameters of a request, validated once. Introduced in phase 2.

Names and meanings are those of vLLM, SGLang and the OpenAI API. Invariant: every instance is valid and holds plain
Python values, so no later stage validates again.
"""

import math
import numbers
from dataclasses import dataclass
from reprlib import repr as short_repr

from shared.errors import RequestError

MAX_SEED = 2**64 - 1  # a Philox key is 64 bits
MAX_LOGPROBS = 20  # maximum number of top log-probabilities per token, as in the OpenAI API


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are sampled, and when it finishes.

    ``temperature`` 0 takes the most likely token; ``top_p`` 1, ``top_k`` None and ``repetition_penalty`` 1 change
    nothing. ``max_new_tokens`` counts generated tokens. ``stop`` holds strings that end the output (a single string may
    be given directly). ``seed`` None lets the engine choose one. ``ignore_eos`` generates past end-of-sequence ids.
    ``logprobs`` requests the log-probability of each sampled token and of that many most likely tokens (0: of the
    sampled token alone; None: none), computed from raw logits; engines that serve one request at a time omit them.

    Raises:
        RequestError: a value has the wrong type or lies out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    repetition_penalty: float = 1.0
    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        temperature = _real(
            "temperature", self.temperature, "a number of at least 0, where 0 means the most likely token"
        )
        _require(
            math.isfinite(temperature) and temperature >= 0,
            "temperature",
            self.temperature,
            "a finite number of at least 0; 0 takes the most likely token, 0.7 to 1.0 is usual",
        )
        top_p = _real("top_p", self.top_p, "a number above 0 and at most 1")
        _require(0 < top_p <= 1, "top_p", self.top_p, "above 0 and at most 1; 1 keeps every token")
        penalty = _real("repetition_penalty", self.repetition_penalty, "a number above 0")
        _require(
            math.isfinite(penalty) and penalty > 0,
            "repetition_penalty",
            self.repetition_penalty,
            "a finite number above 0; 1 means no penalty, 1.1 discourages repeats",
        )
        top_k = None
        if self.top_k is not None:
            top_k = _integer("top_k", self.top_k, "an integer of at least 1, or left out for no limit")
            _require(top_k >= 1, "top_k", self.top_k, "at least 1; leave it out for no limit")
        max_new_tokens = _integer("max_new_tokens", self.max_new_tokens, "an integer of at least 1")
        _require(max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "at least 1")
        seed = None
        if self.seed is not None:
            seed = _integer("seed", self.seed, "an integer from 0 to 2**64 - 1, or left out for a random one")
            _require(0 <= seed <= MAX_SEED, "seed", self.seed, "from 0 to 2**64 - 1; leave it out for a random one")
        _require(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "True or False")
        logprobs = None
        if self.logprobs is not None:
            logprobs = _integer("logprobs", self.logprobs, f"an integer from 0 to {MAX_LOGPROBS}, or left out")
            remedy = f"from 0 to {MAX_LOGPROBS}, the number of most likely tokens to report; leave it out for none"
            _require(0 <= logprobs <= MAX_LOGPROBS, "logprobs", self.logprobs, remedy)
        values = {
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "repetition_penalty": penalty,
            "max_new_tokens": max_new_tokens,
            "stop": _stop_strings(self.stop),
            "seed": seed,
            "logprobs": logprobs,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)  # converted to plain int, float and tuple

    @property
    def is_greedy(self) -> bool:
        """Whether every token is the arg-max, without randomness."""
        return self.temperature == 0


def _require(is_valid: bool, field: str, value: object, remedy: str) -> None:
    if not is_valid:
        raise RequestError(f"{field} is {short_repr(value)}; it must be {remedy}.")


def _real(field: str, value: object, remedy: str) -> float:
    _require(isinstance(value, numbers.Real) and not isinstance(value, bool), field, value, remedy)
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError:  # an integer beyond the range of floats
        return math.inf


def _integer(field: str, value: object, remedy: str) -> int:
    _require(isinstance(value, numbers.Integral) and not isinstance(value, bool), field, value, remedy)
    return int(value)  # type: ignore[call-overload]


def _stop_strings(value: object) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value
    _require(isinstance(strings, tuple | list), "stop", value, "one string or a list of strings")
    for text in strings:  # type: ignore[attr-defined]
        _require(isinstance(text, str), "stop", value, "strings only; convert token ids to text first")
        _require(text != "", "stop", value, "without empty strings, which would end every output at once")
    return tuple(strings)  # type: ignore[arg-type]

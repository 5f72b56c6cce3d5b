"""The sampling parameters of a request, validated once. Introduced in phase 2.

Names and meanings are those of vLLM, SGLang and the OpenAI API. Invariant: every instance is valid and holds plain
Python values, so no later stage validates again.
"""

import math
import numbers
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from reprlib import repr as short_repr
from typing import Any

from shared.errors import RequestError

MAX_SEED = 2**64 - 1  # a Philox key is 64 bits
MAX_LOGPROBS = 20  # maximum number of top log-probabilities per token, as in the OpenAI API
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0  # as in the OpenAI API
MAX_PENALTY = 2.0  # of presence_penalty and frequency_penalty, as in the OpenAI API
MAX_STOP_TOKEN_IDS = 128
MAX_CACHE_SALT = 256  # characters


LATER = {"prompt_logprobs": "04", "thinking_budget": "11.1", "min_thinking_tokens": "11.1", "structured_output": "12"}
"""The fields that only some engines support, each with the phase that introduces it."""


class StructuredOutput:
    """A constraint on an output; the only kind, ``Grammar``, comes with phase 12, and earlier phases do not load it."""


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are sampled, and when it finishes.

    Attributes:
        temperature: 0 takes the most likely token.
        top_p, top_k, min_p: limits on the tokens that may be sampled; 1, None and 0 keep every token.
        repetition_penalty: for tokens of the prompt and the output; 1 changes nothing.
        presence_penalty, frequency_penalty: for tokens of the output, once and for each occurrence; 0 changes nothing.
        logit_bias: added to the logits of these token ids. A mapping is stored as pairs in the order of their ids.
        max_new_tokens: the maximum output length. 0 generates nothing and needs ``prompt_logprobs``.
        min_tokens: no end-of-sequence id and no stop ends the output before this many tokens.
        stop: strings that end the output; a single string may be given directly.
        stop_token_ids: token ids that end the output, even if ``ignore_eos`` is set.
        seed: None lets the engine choose one.
        ignore_eos: generate past end-of-sequence ids.
        logprobs: report the log-probability of each sampled token and of this many most likely tokens (0: only of the
            sampled token; None: none), computed from raw logits.
        prompt_logprobs: the same for each prompt token after the first. Engines that serve one request at a time omit
            ``logprobs`` and refuse ``prompt_logprobs``.
        cache_salt: requests share cached prefixes only with requests that have the same salt (phase 8). This keeps the
            time to the first token from revealing one tenant's prompts to another.
        use_speculative_decoding: False keeps an engine that speculates (phase 11) from drafting for this request.
        prediction_ids: the expected output, if much of it is known in advance. An engine that looks up drafts in the
            text looks here too; others ignore it. With coupled acceptance no token depends on it.
        thinking_budget: the maximum number of thinking tokens of a model that thinks (Qwen 3); then its thinking is
            closed. Phase 11.1 enforces this limit and the next.
        min_thinking_tokens: the minimum number of thinking tokens: until then a word such as "Wait" replaces the end of
            thinking, and neither end-of-sequence ids nor ``stop_token_ids`` are sampled.
        structured_output: the grammar of the output (phase 12), which ends with an end-of-sequence id once the grammar
            is complete. It takes precedence over ``min_tokens``; if ``max_new_tokens`` ends the output, the output is a
            prefix of a valid one.

    Raises:
        RequestError: a value has the wrong type or is out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    max_new_tokens: int = 128
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    cache_salt: str | None = None
    use_speculative_decoding: bool = True
    prediction_ids: tuple[int, ...] = ()
    thinking_budget: int | None = None
    min_thinking_tokens: int = 0
    structured_output: StructuredOutput | None = None

    def __post_init__(self) -> None:
        real, whole = numbers.Real, numbers.Integral
        remedy = "a finite number of at least 0; 0 takes the most likely token, 0.7 to 1.0 is usual"
        self._settle("temperature", real, lambda number: 0 <= number < math.inf, remedy)
        self._settle("top_p", real, lambda p: 0 < p <= 1, "a number above 0 and at most 1; 1 keeps every token")
        self._settle("min_p", real, lambda p: 0 <= p <= 1, "a number from 0 to 1; 0 keeps every token")
        remedy = "a finite number above 0; 1 means no penalty, 1.1 discourages repeats"
        self._settle("repetition_penalty", real, lambda penalty: 0 < penalty < math.inf, remedy)
        for field in ("presence_penalty", "frequency_penalty"):
            remedy = f"a number from -{MAX_PENALTY:g} to {MAX_PENALTY:g}, where 0 means no penalty"
            self._settle(field, real, lambda penalty: abs(penalty) <= MAX_PENALTY, remedy)
        self._settle("top_k", whole, lambda k: k >= 1, "an integer of at least 1; leave it out for no limit")
        for field in ("logprobs", "prompt_logprobs"):
            remedy = f"an integer from 0 to {MAX_LOGPROBS}, the most likely tokens to report; leave it out for none"
            self._settle(field, whole, lambda count: 0 <= count <= MAX_LOGPROBS, remedy)
        remedy = "an integer of at least 1, or 0 together with prompt_logprobs"
        self._settle("max_new_tokens", whole, lambda count: count >= (self.prompt_logprobs is None), remedy)
        remedy = f"an integer from 0 to max_new_tokens, which is {self.max_new_tokens}"
        self._settle("min_tokens", whole, lambda count: 0 <= count <= self.max_new_tokens, remedy)
        self._settle("min_thinking_tokens", whole, lambda count: count >= 0, "an integer of at least 0")
        least = self.min_thinking_tokens
        remedy = f"an integer of at least min_thinking_tokens, which is {least}; leave it out for no limit"
        self._settle("thinking_budget", whole, lambda count: count >= least, remedy)
        remedy = "an integer from 0 to 2**64 - 1; leave it out for a random one"
        self._settle("seed", whole, lambda seed: 0 <= seed <= MAX_SEED, remedy)
        for flag in ("ignore_eos", "use_speculative_decoding"):
            _require(isinstance(getattr(self, flag), bool), flag, getattr(self, flag), "True or False")
        if self.cache_salt is not None:
            remedy = f"a string of 1 to {MAX_CACHE_SALT} characters, or left out"
            is_valid = isinstance(self.cache_salt, str) and 1 <= len(self.cache_salt) <= MAX_CACHE_SALT
            _require(is_valid, "cache_salt", self.cache_salt, remedy)
        if self.structured_output is not None:
            remedy = "a Grammar, such as Grammar.regex('[0-9]+'), or left out"
            _require(
                isinstance(self.structured_output, StructuredOutput),
                "structured_output",
                self.structured_output,
                remedy,
            )
            remedy = "False with structured_output, because the end of a grammar is an end-of-sequence id"
            _require(not self.ignore_eos, "ignore_eos", self.ignore_eos, remedy)
        self._set("logit_bias", _logit_bias(self.logit_bias))
        self._set("stop", _stop_strings(self.stop))
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS))
        self._set("prediction_ids", _token_ids("prediction_ids", self.prediction_ids))

    def _set(self, field: str, value: object) -> None:
        object.__setattr__(self, field, value)

    def _settle(self, field: str, kind: type, is_valid: Callable[[Any], bool], remedy: str) -> None:
        """Convert a number to a plain float or int, and check it; None is kept if it is the default."""
        value = getattr(self, field)
        if value is None and self.__dataclass_fields__[field].default is None:
            return
        _require(_is(kind, value), field, value, remedy)
        try:
            number = int(value) if kind is numbers.Integral else float(value)
        except OverflowError:  # an integer beyond the range of floats
            number = math.inf
        _require(is_valid(number), field, value, remedy)
        self._set(field, number)

    @property
    def is_greedy(self) -> bool:
        """Whether every token is the arg-max, without randomness."""
        return self.temperature == 0

    @cached_property
    def has_penalties(self) -> bool:
        """Whether tokens that have already occurred are penalised."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @cached_property
    def adjusts_logits(self) -> bool:
        """Whether logits are biased or penalised, which can also change the most likely token."""
        return self.has_penalties or bool(self.logit_bias)

    @property
    def limits_thinking(self) -> bool:
        """Whether the model's thinking has a minimum or a maximum length."""
        return self.thinking_budget is not None or self.min_thinking_tokens > 0

    def end_ids(self, eos_ids: Iterable[int], vocab_size: int) -> tuple[int, ...]:
        """The ids that ``min_tokens`` masks: ``stop_token_ids`` and the ``eos_ids`` that are in the vocabulary, as in
        vLLM even with ``ignore_eos``. Raises RequestError as ``check_token_ids`` does.
        """
        self.check_token_ids(vocab_size)
        return tuple(token_id for token_id in {*eos_ids, *self.stop_token_ids} if token_id < vocab_size)

    def check(self, supported: Collection[str] = ()) -> None:
        """Raise RequestError for a field of ``LATER`` that is set and not in ``supported``, and name its phase."""
        for field, phase in LATER.items():
            if field not in supported:
                value, default = getattr(self, field), self.__dataclass_fields__[field].default
                remedy = f"left out: this engine does not support it, and the engine of phase {phase} does"
                _require(value == default, field, value, remedy)

    def check_token_ids(self, vocab_size: int) -> None:
        """Raise RequestError if a field holds an id outside the vocabulary."""
        for field in ("logit_bias", "stop_token_ids", "prediction_ids"):
            ids = getattr(self, field)
            largest = max(dict(ids) if field == "logit_bias" else ids, default=0)
            remedy = f"ids of this model's vocabulary, from 0 to {vocab_size - 1}"
            _require(largest < vocab_size, field, largest, remedy)


def _require(is_valid: bool, field: str, value: object, remedy: str) -> None:
    if not is_valid:
        raise RequestError(f"{field} is {short_repr(value)}; it must be {remedy}.")


def _is(kind: type, value: object) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    remedy = f"a mapping of token ids, from 0 on, to numbers from -{MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}"
    are_pairs = isinstance(value, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value)
    _require(isinstance(value, Mapping) or are_pairs, "logit_bias", value, remedy)
    biases = {}
    for token_id, bias in dict(value).items():  # type: ignore[call-overload]
        is_valid = _is(numbers.Integral, token_id) and _is(numbers.Real, bias)
        is_valid = is_valid and token_id >= 0 and abs(bias) <= MAX_LOGIT_BIAS
        _require(is_valid, "logit_bias", {token_id: bias}, remedy)
        biases[int(token_id)] = float(bias)
    _require(len(biases) <= MAX_LOGIT_BIASES, "logit_bias", value, f"of at most {MAX_LOGIT_BIASES} token ids")
    return tuple(sorted(biases.items()))


def _token_ids(field: str, value: object, most: int | None = None) -> tuple[int, ...]:
    limit = "" if most is None else f"at most {most} "
    remedy = f"a list of {limit}token ids, which are integers from 0 on"
    _require(isinstance(value, tuple | list), field, value, remedy)
    ids: tuple[Any, ...] = tuple(value)  # type: ignore[arg-type]
    is_valid = most is None or len(ids) <= most
    is_valid = is_valid and all(_is(numbers.Integral, token_id) and token_id >= 0 for token_id in ids)
    _require(is_valid, field, value, remedy)
    return tuple(map(int, ids))


def _stop_strings(value: object) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value
    _require(isinstance(strings, tuple | list), "stop", value, "one string or a list of strings")
    for text in strings:  # type: ignore[attr-defined]
        _require(isinstance(text, str), "stop", value, "strings only; convert token ids to text first")
        _require(text != "", "stop", value, "without empty strings, which would end every output at once")
    return tuple(strings)  # type: ignore[arg-type]

"""Validates prompts and queue limits. Introduced in phase 1b.

Engine and server apply the same checks, so each rule and its message exist once, here. Invariant: every prompt that
reaches a model has passed ``check_prompt``, so an invalid id raises RequestError and never IndexError.
"""

import struct
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from shared.errors import ContextLengthError, QueueFullError, RequestError


class CheckedIds(list[int]):
    """Ids that ``check_prompt`` found valid for a vocabulary of this size. They must not be changed, so one check is
    enough."""

    packed: bytes  # by `packed`
    vocab_size: int


def packed(ids: Sequence[int]) -> bytes:
    """The ids as int64, in a third of the time that ``np.array`` takes. Raises struct.error for an id beyond 64
    bits."""
    return struct.pack(f"{len(ids)}q", *ids)


def check_prompt(prompt_ids: Sequence[int], vocab_size: int, max_seq_len: int) -> CheckedIds:
    """The ids, checked; raises RequestError if the prompt is empty, too long, or has ids outside the vocabulary."""
    if len(prompt_ids) == 0:
        raise RequestError("The prompt is empty; give at least one token of text or one token id.")
    if len(prompt_ids) >= max_seq_len:
        raise _too_long(f"{len(prompt_ids)} tokens", max_seq_len, _shorter_than(max_seq_len))
    if isinstance(prompt_ids, CheckedIds) and prompt_ids.vocab_size <= vocab_size:
        return prompt_ids
    ids = CheckedIds(prompt_ids)
    if all(issubclass(each, int) and each is not bool for each in set(map(type, ids))):  # no Python loop over the ids
        with suppress(struct.error):
            ids.packed, ids.vocab_size = packed(ids), vocab_size
            array = np.frombuffer(ids.packed, np.int64)
            if array.min() >= 0 and array.max() < vocab_size:
                return ids
    wrong = next(
        token_id
        for token_id in ids
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size
    )
    raise RequestError(
        f"The prompt holds the token id {wrong!r}; this model's ids are integers from 0 to {vocab_size - 1}."
    )


def check_length(least_tokens: int, max_seq_len: int) -> None:
    """Raise ContextLengthError if a text must have too many tokens, however it is tokenized."""
    if least_tokens >= max_seq_len:
        raise _too_long(f"at least {least_tokens} tokens", max_seq_len, _shorter_than(max_seq_len))


def check_capacity(num_prompt_tokens: int, max_new_tokens: int, max_seq_len: int, request_capacity: int) -> None:
    """Raise ContextLengthError if the request could exceed ``request_capacity``, the tokens that the KV cache can hold
    for one request."""
    needed = min(num_prompt_tokens + max_new_tokens, max_seq_len)
    if needed > request_capacity:
        raise _too_long(
            f"{needed} tokens ({num_prompt_tokens} in the prompt, {needed - num_prompt_tokens} in the output)",
            request_capacity,
            f"and the KV cache holds {request_capacity} for one request: shorten the prompt, or lower max_new_tokens.",
        )


def check_queue(num_waiting: int, max_waiting_requests: int, num_new: int = 1) -> None:
    """Raise QueueFullError if ``num_new`` requests do not fit in the queue, RequestError if they never could."""
    if num_new > max_waiting_requests:
        raise RequestError(
            f"{num_new} requests come together and max_waiting_requests is {max_waiting_requests}; send fewer at once."
        )
    if num_waiting + num_new > max_waiting_requests:
        raise QueueFullError(
            f"{num_waiting} requests wait and max_waiting_requests is {max_waiting_requests}; try again later."
        )


def _shorter_than(max_seq_len: int) -> str:
    return (
        f"and the output needs at least one more: shorten the prompt to at most {max_seq_len - 1}, or raise "
        "max_seq_len up to the model's limit."
    )


def _too_long(requested: str, most: int, advice: str) -> ContextLengthError:
    """Begins with OpenAI's sentence, from which agents recognize that they must shorten their history."""
    return ContextLengthError(
        f"This model's maximum context length is {most} tokens. However, you requested {requested}, {advice}"
    )

"""What may be a prompt, and what may be queued. Introduced in phase 1b.

A server asks the same questions before it hands a request over, so each rule and its sentence stand here once.
Invariant: whatever reaches a model has passed here, so a bad id is an error in words and never an index out of range.
"""

from collections.abc import Sequence

from shared.errors import QueueFullError, RequestError


def check_prompt(prompt_ids: Sequence[int], vocab_size: int, max_seq_len: int) -> list[int]:
    """The ids as a list; raises RequestError for an empty prompt, too long a one, or ids out of the vocabulary."""
    ids = list(prompt_ids)
    if not ids:
        raise RequestError("The prompt is empty; give at least one token of text or one token id.")
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise RequestError(
                f"The prompt holds the token id {token_id!r}; this model's ids are whole numbers from 0 to "
                f"{vocab_size - 1}."
            )
    if len(ids) >= max_seq_len:
        raise RequestError(
            f"The prompt has {len(ids)} tokens and a sequence may have {max_seq_len}, answer included; shorten it to "
            f"at most {max_seq_len - 1}, or raise max_seq_len as far as the model allows."
        )
    return ids


def check_capacity(num_prompt_tokens: int, max_new_tokens: int, max_seq_len: int, request_capacity: int) -> None:
    """Raise RequestError if the memory, of ``request_capacity`` tokens for one request, could never hold this one."""
    needed = min(num_prompt_tokens + max_new_tokens, max_seq_len)
    if needed > request_capacity:
        raise RequestError(
            f"The prompt has {num_prompt_tokens} tokens and with its answer up to {needed}; the KV memory holds "
            f"{request_capacity} for one request: shorten the prompt, or lower max_new_tokens."
        )


def check_queue(num_waiting: int, max_waiting_requests: int) -> None:
    """Raise QueueFullError if as many requests wait as may wait."""
    if num_waiting >= max_waiting_requests:
        raise QueueFullError(
            f"{num_waiting} requests wait and max_waiting_requests is {max_waiting_requests}; try again when some have "
            "been answered."
        )

"""What may be a prompt. Introduced in phase 1b.

Invariant: whatever reaches a model has passed here, so a bad id is an error in words and never an index out of range.
"""

from collections.abc import Sequence

from shared.errors import RequestError


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

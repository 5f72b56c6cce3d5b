"""The marks around a model's thoughts, and whether a prompt ends within them. Introduced in phase 11.1.

A model that thinks writes ``<think>``, its thoughts, ``</think>``, and then its answer. A prompt may have opened the
thoughts: some templates end with ``<think>``, and so may a message that is to be continued. Thinking limits, the call
reader and the grammar of an answer all use this module.

Invariant: nothing before the last special token counts, since the assistant's turn begins there. If no special token
begins a turn, only the end of the prompt counts. If a mark is a token, only that token counts, since a user's text
never becomes it.
"""

from collections.abc import Sequence

from shared.text.tokenizer import Tokenizer

Marks = tuple[str, str]
"""What opens thoughts, and what closes them."""

OPEN, CLOSE = MARKS = "<think>", "</think>"
OPENED: Marks = "", CLOSE
"""The marks in an answer whose prompt ends inside thoughts: nothing opens them there."""


def thinks(tokenizer: Tokenizer) -> bool:
    """Whether a model with this tokenizer writes thoughts that can be distinguished from its answer."""
    return None not in map(tokenizer.token_id, MARKS)


def ends_in_thoughts(prompt_ids: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Whether an answer to the prompt continues thoughts."""
    special = tokenizer.special_ids
    if thinks(tokenizer):
        open_id, close_id = map(tokenizer.token_id, MARKS)
        control = special | {open_id, close_id}
        return next((token_id for token_id in reversed(prompt_ids) if token_id in control), None) == open_id
    begin = next((index for index in range(len(prompt_ids), 0, -1) if prompt_ids[index - 1] in special), 0)
    text = tokenizer.decode(list(prompt_ids[begin:]))
    if begin <= 1:  # no special token begins a turn, so a mark in the middle may be a user's
        return text.rstrip().endswith(OPEN)
    return text.rfind(OPEN) > text.rfind(CLOSE)

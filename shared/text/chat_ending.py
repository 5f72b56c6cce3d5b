"""How a conversation's prompt ends, whichever template renders it. Introduced in phase 4.

Invariant: an open prompt ends where the last message's text does, as with transformers' ``continue_final_message``: a
template that trims contents trims this one too.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

from shared.errors import RequestError
from shared.text.chat import ChatMessage


class Ending(Enum):
    """What a prompt ends with."""

    HEADER = "the header of the assistant's next turn"
    TURN = "the end of the last message's turn"
    OPEN = "the text of the last message, which goes on"


def ended_parts(
    render: Callable[..., list[str]], messages: Sequence[ChatMessage], ending: Ending, **options: Any
) -> list[str]:
    """The prompt's text in parts, in the form that ``render`` gives: `shared.text.chat.chat_parts` without its
    tokenizer.

    Raises RequestError as ``render`` does, and if the text to be continued is not in the prompt.
    """
    if ending is not Ending.OPEN:
        return render(messages, add_generation_prompt=ending is Ending.HEADER, **options)
    *before, last = messages
    used = set().union(*(message.content for message in messages))
    end = next(chr(code) for code in range(0x100000, 0x10FFFE) if chr(code) not in used)  # private use
    marked = render([*before, replace(last, content=last.content + end)], add_generation_prompt=False, **options)
    number = next((number for number, part in enumerate(marked) if end in part), None)
    if number is None:
        raise RequestError("The chat template does not write the last message's text, so no answer can continue it.")
    parts = [*marked[:number], marked[number].partition(end)[0]]
    if last.content[-1:].isspace():
        whole = render(messages, add_generation_prompt=False, **options)
        if not "".join(whole).startswith("".join(parts)):
            parts[-1] = parts[-1].rstrip()
    return parts

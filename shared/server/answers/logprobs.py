"""Log probabilities in OpenAI's two formats: completions and chat. Introduced in phase 4.

Invariant: a token is shown as its text if its bytes are valid UTF-8, otherwise as its bytes; a special token by name.
So different tokens in a list rarely have the same name.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from shared.engine.output import StepOutput
from shared.engine.request import TokenLogprobs
from shared.text.tokenizer import Tokenizer


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """The text of one token; ``bytes:\\xe2\\x82`` if it is a part of a character."""
    piece = tokenizer.token_bytes(token_id)
    if not piece:
        return tokenizer.decode([token_id], skip_special_tokens=False)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


class Scored(NamedTuple):
    """A token of a completion, the text it adds, and its log-probabilities: None for the first token of a prompt."""

    token_id: int
    text: str
    logprobs: TokenLogprobs | None


def scored(outputs: Sequence[StepOutput]) -> list[Scored]:
    """Keeps only the outputs that have log-probabilities."""
    return [
        Scored(output.token_id, output.text, output.logprobs)
        for output in outputs
        if output.token_id is not None and output.logprobs is not None
    ]


def completion_logprobs(tokenizer: Tokenizer, tokens: Sequence[Scored], offset: int) -> dict[str, Any]:
    """``logprobs`` of a completion; ``offset`` is where the first of these tokens starts in the choice's text."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token_text(tokenizer, token.token_id) for token in tokens],
        "token_logprobs": [token.logprobs and token.logprobs.logprob for token in tokens],
        "top_logprobs": [token.logprobs and _by_name(tokenizer, token.logprobs) for token in tokens],
        "text_offset": offsets,
    }


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[Scored], num_top: int) -> dict[str, Any]:
    """``logprobs`` of a choice of a chat completion, each token with the ``num_top`` most likely ones.

    The sampled token's value is always included; in a completion, a sampled token that is not among the most likely is
    an extra entry.
    """
    content = []
    for token_id, _, logprobs in tokens:
        assert logprobs is not None
        top = [_named(tokenizer, other, logprob) for other, logprob in logprobs.top[:num_top]]
        content.append({**_named(tokenizer, token_id, logprobs.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _by_name(tokenizer: Tokenizer, logprobs: TokenLogprobs) -> dict[str, float]:
    """Of two tokens with the same name, the likelier is kept."""
    named: dict[str, float] = {}
    for token_id, logprob in logprobs.top:
        named.setdefault(token_text(tokenizer, token_id), logprob)
    return named


def _named(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    piece = tokenizer.token_bytes(token_id)
    return {"token": token_text(tokenizer, token_id), "logprob": logprob, "bytes": list(piece) if piece else None}

"""Log probabilities in OpenAI's two formats: completions and chat. Introduced in phase 4.

Invariant: a token is named by its text if its bytes are valid UTF-8, else by its bytes; a special token by its name. So
different tokens of a list rarely have the same name.
"""

from collections.abc import Sequence
from typing import Any

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


def completion_logprobs(
    tokenizer: Tokenizer, outputs: Sequence[tuple[StepOutput, TokenLogprobs]], offset: int
) -> dict[str, Any]:
    """``logprobs`` of a completion; ``offset`` is where the first of these tokens starts in the answer's text."""
    tokens = [token_text(tokenizer, output.token_id) for output, _ in outputs if output.token_id is not None]
    offsets = []
    for output, _ in outputs:
        offsets.append(offset)
        offset += len(output.text)
    return {
        "tokens": tokens,
        "token_logprobs": [logprobs.logprob for _, logprobs in outputs],
        "top_logprobs": [_by_name(tokenizer, logprobs) for _, logprobs in outputs],
        "text_offset": offsets,
    }


def chat_logprobs(tokenizer: Tokenizer, outputs: Sequence[tuple[StepOutput, TokenLogprobs]]) -> dict[str, Any]:
    """``logprobs`` of a choice of a chat completion."""
    content = []
    for output, logprobs in outputs:
        assert output.token_id is not None
        top = [_named(tokenizer, token_id, logprob) for token_id, logprob in logprobs.top]
        content.append({**_named(tokenizer, output.token_id, logprobs.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def with_logprobs(outputs: Sequence[StepOutput]) -> list[tuple[StepOutput, TokenLogprobs]]:
    """The outputs that have log probabilities, with these."""
    return [(output, output.logprobs) for output in outputs if output.logprobs is not None]


def _by_name(tokenizer: Tokenizer, logprobs: TokenLogprobs) -> dict[str, float]:
    """Of two tokens with the same name, the likelier."""
    named: dict[str, float] = {}
    for token_id, logprob in logprobs.top:
        named.setdefault(token_text(tokenizer, token_id), logprob)
    return named


def _named(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    piece = tokenizer.token_bytes(token_id)
    return {"token": token_text(tokenizer, token_id), "logprob": logprob, "bytes": list(piece) if piece else None}

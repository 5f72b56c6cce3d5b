"""A lower bound on a text's number of tokens, without tokenizing it. Introduced in phase 4.

A server uses it to refuse a prompt that no sequence can hold: tokenizing two megabytes takes a second. Invariant: no
text has fewer tokens than the bound; for a tokenizer that may drop or shrink text without limit, the bound is 0.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

from shared.text.token_decoder import BYTE_ALPHABET, flattened
from shared.text.tokenizer import Tokenizer

NFC_SHRINKS = 4
"""NFC shortens no UTF-8 text by more than this factor (3.5 times: U+1FBE U+0308 U+0301 become U+0390)."""
_KEEPING = ("ByteLevel", "Digits", "Metaspace")
"""Pre-tokenizers that split a text and drop none of it; Split does too, unless it removes what it matches."""


@dataclass(frozen=True)
class TextBound:
    """``bytes_per_token``: the maximum number of UTF-8 bytes that one token represents; None if there is no limit.
    ``uncounted``: bytes that the vocabulary lacks; a byte-level tokenizer drops them.
    """

    bytes_per_token: int | None
    uncounted: bytes = b""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "TextBound":
        """Derive the bound from the vocabulary and the steps of the tokenizer."""
        backend = tokenizer.backend
        shrinks = [1, *(_shrinks(step) for step in _steps(backend.normalizer, "normalizers"))]
        cuts = _steps(backend.pre_tokenizer, "pretokenizers")
        added = backend.get_added_tokens_decoder().values()
        is_bounded = (
            type(backend.model).__name__ == "BPE"
            and all(shrinks)
            and all(_keeps(cut) for cut in cuts)
            and not any(token.lstrip or token.rstrip for token in added)  # such a token absorbs adjacent spaces
        )
        if not is_bounded:
            return cls(None)
        vocabulary = backend.get_vocab(with_added_tokens=False)
        uncounted = b""
        if any(cut["type"] == "ByteLevel" for cut in cuts):
            uncounted = bytes(byte for character, byte in BYTE_ALPHABET.items() if character not in vocabulary)
            lengths = [len(token) for token in vocabulary]  # one character per byte
            is_bounded = not (uncounted and backend.normalizer is not None)
        else:
            lengths = [len(token.encode()) for token in vocabulary]
            is_bounded = backend.model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
        lengths += [len(token.content.encode()) for token in added]
        return cls(max(lengths) * math.prod(shrinks) if is_bounded else None, uncounted)

    def least_tokens(self, text: str) -> int:
        """``text`` has at least this many tokens."""
        if self.bytes_per_token is None:
            return 0
        num_bytes = len(text.encode(errors="surrogatepass").translate(None, self.uncounted))
        return -(-num_bytes // self.bytes_per_token)


def _steps(part: Any, name: str) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, as JSON; a sequence holds its steps in the field ``name``."""
    return flattened(json.loads(part.__getstate__()), name) if part is not None else []


def _shrinks(step: dict[str, Any]) -> int:
    """The factor by which a normalizer can shorten a text; 0 if no limit is known."""
    match step:
        case {"type": "NFC"}:
            return NFC_SHRINKS
        case {"type": "Prepend"}:
            return 1
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return 1 if len(old.encode()) <= len(new.encode()) else 0
    return 0


def _keeps(step: dict[str, Any]) -> bool:
    return step["type"] in _KEEPING or (step["type"] == "Split" and step["behavior"] != "Removed")

"""From a token's string to its bytes, for the two kinds of BPE vocabulary in use.

A vocabulary stores tokens as printable strings, and the tokenizer's *decoder* says how these become text. Streaming and
grammar masks need that per token and in bytes, because a character may span several tokens. The kind is read from the
decoder's own JSON, never guessed from a model's name. Introduced in phase 1b.

Invariant: joining `bytes_of` over the non-special tokens of a text gives exactly the bytes that the tokenizer's own
decoder works on; the caller handles bytes that are not UTF-8, and `stripped_prefix`.
"""

import json
from dataclasses import dataclass
from typing import Any

from shared.errors import ModelFolderError

SUPPORTED_DECODERS = (
    "ByteLevel (GPT-2's byte alphabet: Llama 3, Qwen 3, SmolLM2), or a Sequence of Replace, ByteFallback, Fuse and a "
    "left Strip in that order (SentencePiece style: Gemma 3)"
)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet (openai/gpt-2, ``bytes_to_unicode``): each byte as one printable character. Printable Latin-1
    bytes map to themselves, the others to the code points from 256 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()


@dataclass(frozen=True)
class TokenDecoder:
    """The conversion of a vocabulary's token strings to bytes.

    is_byte_level      every character of a token is one byte of `BYTE_ALPHABET`
    has_byte_fallback  a token ``<0xNN>`` is the byte NN
    replacements       (old, new) pairs applied to a token's string, e.g. ("▁", " ")
    stripped_prefix    (character, n): up to n of it are dropped at the start of the whole text
    """

    is_byte_level: bool = False
    has_byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    stripped_prefix: tuple[str, int] = ("", 0)

    @classmethod
    def from_json(cls, text: str | bytes | None) -> "TokenDecoder":
        """Read the ``decoder`` part of a ``tokenizer.json``; raises ModelFolderError for an unsupported kind."""
        decoder = json.loads(text or "null")
        steps = flattened(decoder, "decoders") if decoder else []
        kinds = [step.get("type") for step in steps]
        if kinds == ["ByteLevel"]:
            return cls(is_byte_level=True)

        remaining = list(steps)
        replacements: list[tuple[str, str]] = []
        while remaining and remaining[0].get("type") == "Replace" and "String" in remaining[0]["pattern"]:
            step = remaining.pop(0)
            replacements.append((step["pattern"]["String"], step["content"]))
        has_byte_fallback = _take(remaining, "ByteFallback") is not None
        is_fused = _take(remaining, "Fuse") is not None
        strip = _take(remaining, "Strip") if is_fused else None
        is_left_strip = strip is None or strip["stop"] == 0
        if not steps or remaining or not is_left_strip:
            found = " → ".join(str(kind) for kind in kinds) or "none"
            raise ModelFolderError(
                f"The tokenizer's decoder is {found}, whose tokens cannot be converted to bytes one by one. "
                f"Supported are {SUPPORTED_DECODERS}."
            )
        prefix = (strip["content"], strip["start"]) if strip else ("", 0)
        return cls(has_byte_fallback=has_byte_fallback, replacements=tuple(replacements), stripped_prefix=prefix)

    def bytes_of(self, token: str) -> bytes:
        """The bytes of one token string; an added token in plain text gives its UTF-8 encoding."""
        # exercise 01bx3: the bytes of one token's string, for both kinds of vocabulary
        # hint: an added token may hold characters outside the byte alphabet; byte_of knows the <0xNN> tokens
        if self.is_byte_level:
            try:
                return bytes(BYTE_ALPHABET[character] for character in token)
            except KeyError:
                return token.encode()
        byte = self.byte_of(token)
        if byte is not None:
            return bytes([byte])
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token.encode()
        # end exercise

    def byte_of(self, token: str) -> int | None:
        """The value NN of a fallback token ``<0xNN>``; None for every other token."""
        if not (self.has_byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">")):
            return None
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None


def flattened(part: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The steps of a part of a tokenizer; a sequence holds its steps in the field ``name``."""
    if part.get("type") != "Sequence":
        return [part]
    return [step for inner in part[name] for step in flattened(inner, name)]


def _take(steps: list[dict[str, Any]], kind: str) -> dict[str, Any] | None:
    return steps.pop(0) if steps and steps[0].get("type") == kind else None

"""The limits on a JSON body, checked on its bytes before it is parsed. Introduced in phase 4.

Parsing and validation hold Python's lock, and their time depends on the number of values, not on the number of bytes.
Invariant: a body that passes has no zero byte, as UTF-16 and UTF-32 would; it has a limited number of values, keys and
levels; and it contains no lone surrogate, which has no encoding.
"""

import json
import re
from typing import Any

import numpy as np

from shared.server.errors import ApiError, invalid

MAX_VALUES, MAX_KEYS, MAX_NESTING = 2**17, 2**13, 256
"""Maximum values (a token id is one), keys and levels of a body."""
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[{]}"))
_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_HALF = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def check_json(body: bytes) -> None:
    """Raise ApiError for a JSON text that is not UTF-8, exceeds the limits, or holds a lone surrogate."""
    if b"\0" in body:  # UTF-16 and UTF-32, which json.loads would accept; in UTF-8, JSON has no zero byte
        raise ApiError(400, "invalid_json", "The body is not JSON in UTF-8: it holds a byte 0.")
    if not _is_small(body, MAX_NESTING) and not _is_bounded(body):
        said = (
            f"The body holds more than {MAX_VALUES} values, {MAX_KEYS} keys or {MAX_NESTING} levels, the limits of "
            "this server."
        )
        raise ApiError(413, "body_too_complex", said)
    if (b"\\u" in body or b"\xed" in body) and _HALF.search(_PAIR.sub(b"", body.replace(rb"\\", b"  "))):
        _check_halves(body)


def _is_small(outside: bytes, most_brackets: int) -> bool:
    """Whether the limits hold, counting brackets, commas and colons: each value except the first follows one of
    them."""
    num_brackets = outside.count(b"[") + outside.count(b"{")
    return (
        num_brackets <= most_brackets
        and num_brackets + outside.count(b",") <= MAX_VALUES
        and outside.count(b":") <= MAX_KEYS
    )


def _is_bounded(body: bytes) -> bool:
    """The same text outside strings."""
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")  # now every quotation mark opens or closes a string
    if plain.count(b'"') > 2 * (MAX_VALUES + MAX_KEYS):
        return False
    outside = b"".join(plain.split(b'"')[::2])
    steps = np.frombuffer(outside.translate(_STEPS, _NO_BRACKETS), np.int8)
    return _is_small(outside, MAX_VALUES) and int(steps.cumsum(dtype=np.int32).max(initial=0)) <= MAX_NESTING


def _check_halves(body: bytes) -> None:
    try:
        found = _half_of(json.loads(body))
    except ValueError:
        return  # invalid JSON is refused by the route
    if found is not None:
        path, half = found
        raise invalid(f"{path} holds {half}, half of a surrogate pair; send whole characters.", param=path)


def _half_of(value: Any, path: str = "") -> tuple[str, str] | None:
    """The path of the first text with a lone surrogate, and the surrogate as an escape."""
    if isinstance(value, str):
        half = _SURROGATE.search(value)
        return None if half is None or not path else (path, ascii(half[0])[1:-1])
    fields = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, field in fields:
        inner = f"{path}.{name}" if path else str(name)
        if (found := _half_of(str(name), inner) or _half_of(field, inner)) is not None:
            return found
    return None

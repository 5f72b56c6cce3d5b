"""Server-sent events as bytes. Introduced in phase 4.

A frame is an optional ``event:`` line, one ``data:`` line and an empty line (WHATWG HTML, section 9.2). Invariant: data
is JSON on one line, so no text of a model can end a frame. That also holds for clients that split lines with
``str.splitlines``, which also splits at U+0085, U+2028 and U+2029: these are escaped.
"""

import json
import re
from typing import Any

DONE = b"data: [DONE]\n\n"
"""The last frame of an OpenAI stream."""
COMMENT = b": keep-alive\n\n"
"""A comment, which clients ignore; it keeps proxies from closing a silent connection."""


_LINE_END = re.compile("[\x85\u2028\u2029]")  # besides those in ASCII, which JSON escapes
# ``json.dumps`` would make a new one each time
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def to_json(value: Any) -> bytes:
    """Compact JSON in UTF-8, on one line."""
    return _LINE_END.sub(lambda found: f"\\u{ord(found[0]):04x}", _encode(value)).encode()


def frame(data: bytes, event: str | None = None) -> bytes:
    """One event; ``data`` is JSON on one line."""
    name = f"event: {event}\n".encode() if event is not None else b""
    return b"%bdata: %b\n\n" % (name, data)

"""The local variables of a running function as short texts. Introduced in phase 4.

It shows numbers, texts, requests, parts of a schedule, small arrays, and short lists of these; other objects are left
out, since other panels show them. Invariant: a text is at most ``LONGEST`` characters.
"""

from collections.abc import Mapping
from types import FrameType
from typing import Any

import numpy as np

from shared.engine.request import Request
from shared.scheduling.schedule import Schedule, Scheduled

LONGEST, MOST = 60, 12


def variables(frame: FrameType) -> dict[str, str]:
    """The shown locals of a frame, in their order."""
    texts = {name: text(value) for name, value in frame.f_locals.items() if name != "self" and name[0] != "_"}
    return {name: shown for name, shown in texts.items() if shown is not None}


def text(value: Any) -> str | None:
    """A value in short form; None if it is not shown."""
    shown = _text(value)
    return shown if shown is None or len(shown) <= LONGEST else shown[: LONGEST - 1] + "…"


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, bool | int | str):
        return repr(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Request):
        return value.request_id
    if isinstance(value, Scheduled):
        return f"{value.request.request_id}[{value.start}:{value.start + value.num_tokens}]"
    if isinstance(value, Schedule):
        return _joined(list(value), "()")
    if isinstance(value, np.ndarray):
        return _joined(value.tolist(), "[]") if value.dtype.kind in "iub" and value.ndim <= 2 else None
    if isinstance(value, list | tuple):
        return _joined(value, "[]" if isinstance(value, list) else "()")
    if isinstance(value, Mapping) and all(isinstance(key, int | str | Request) for key in value):
        pairs = [f"{_text(key)}: {_text(each)}" for key, each in list(value.items())[:MOST]]
        return "{" + ", ".join(pairs) + "}" if not any("None" in pair for pair in pairs) else None
    return None


def _joined(values: Any, brackets: str) -> str | None:
    parts = [_text(each) if each is not None else "None" for each in values[:MOST]]
    if any(part is None for part in parts):
        return None
    more = ", …" if len(values) > MOST else ""
    return brackets[0] + ", ".join(str(part) for part in parts) + more + brackets[1]

"""Differences of JSON states as merge patches (RFC 7386). Introduced in phase 4.

A state is nested dicts without None; lists are values. A patch has the keys that differ: None deletes a key, a dict is
merged, anything else replaces. Invariant: ``applied(before, difference(before, after)) == after``.
"""

from typing import Any

State = dict[str, Any]


def difference(before: State, after: State) -> State:
    """The patch from one state to another; empty if they are equal."""
    patch: State = {key: None for key in before if key not in after}
    for key, new in after.items():
        old = before.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            if changed := difference(old, new):
                patch[key] = changed
        elif old != new:
            patch[key] = new
    return patch


def applied(state: State, patch: State) -> State:
    """The state after a patch; neither is changed."""
    result = dict(state)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            old = result.get(key)
            result[key] = applied(old if isinstance(old, dict) else {}, value)
        else:
            result[key] = value
    return result

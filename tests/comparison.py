"""Comparisons whose failure says what is wrong: the first wrong element by the names of its axes, and the pattern.

A test that an exercise maps to is read by a learner whose code fails it. `Tensor-likes are not close` tells them
nothing; "logits: sequence 1, token 0 should be 3.5 and is 2.1; every token of sequence 1 is wrong" tells where to look.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

MOST_SHOWN = 200
"""Characters of one value that a message shows."""


def assert_equal(got: Any, want: Any, what: str, axes: Sequence[str] = ()) -> None:
    """The same value. Tensors and arrays must have the same shape and dtype, and no NaN.

    Args:
        what: what the value is, the beginning of the message: "positions".
        axes: the meaning of each dimension, or of each level of nested lists: ("token", "head", "dim").
    """
    if isinstance(want, torch.Tensor | np.ndarray):
        _compare(got, want, what, axes, 0.0, 0.0)
        return
    place, difference = _first_difference(got, want)
    if difference is not None:
        names = [_axis(axes, depth) for depth in range(len(place))]
        where = "".join(f", {name} {index}" for name, index in zip(names, place, strict=True))
        lines = [f"{what}{where}: {difference}"]
        if place:
            lines += [f"in full: expected {_shown(want)}", f"         got      {_shown(got)}"]
        raise AssertionError("\n".join(lines))


def assert_close(
    got: torch.Tensor, want: torch.Tensor, what: str, axes: Sequence[str] = (), *, rtol: float = 0.0, atol: float = 0.0
) -> None:
    """Each element within ``atol + rtol · |expected|``; shape and dtype as expected, and no NaN."""
    _compare(got, want, what, axes, rtol, atol)


def assert_rows_close(got: torch.Tensor, want: torch.Tensor, bound: float, what: str, axes: Sequence[str] = ()) -> None:
    """The last dimension of each row within ``bound``: root mean square of the errors over that of the row."""
    if got.shape == want.shape and got.dtype == want.dtype:
        size = want.double().square().mean(-1, keepdim=True).sqrt()
        error = (got.double() - want.double()).abs()
        is_wrong = ~(error.square().mean(-1, keepdim=True).sqrt() <= bound * size)
        wrong = is_wrong & ~(error <= bound * size)
        if wrong.any():
            raise AssertionError(_report(got, want, wrong, what, axes, f"each may be off by {bound:g} of its row"))
        return
    _compare(got, want, what, axes, 0.0, 0.0)


def assert_within(
    got: torch.Tensor, want: torch.Tensor, bound: torch.Tensor, what: str, axes: Sequence[str] = (), unit: str = ""
) -> None:
    """Each element within its own ``bound``, a tensor of the same shape; ``unit`` says how the bound was made."""
    error = (got.to(want.dtype) - want).abs()
    wrong = ~((error <= bound) | (got.to(want.dtype) == want))
    if wrong.any():
        raise AssertionError(_report(got, want, wrong, what, axes, f"each may be off by {unit}" if unit else ""))


def _compare(
    got: torch.Tensor | np.ndarray,
    want: torch.Tensor | np.ndarray,
    what: str,
    axes: Sequence[str],
    rtol: float,
    atol: float,
) -> None:
    if type(got) is not type(want):
        raise AssertionError(f"{what}: expected {type(want).__name__}, got {_shown(got)}")
    if tuple(got.shape) != tuple(want.shape):
        named = f" ({', '.join(axes)})" if axes else ""
        raise AssertionError(f"{what}: expected the shape {list(want.shape)}{named}, got {list(got.shape)}")
    if got.dtype != want.dtype:
        raise AssertionError(f"{what}: expected {want.dtype}, got {got.dtype}")
    ours, theirs = torch.as_tensor(got).detach(), torch.as_tensor(want).detach()
    if ours.dtype in (torch.bool, torch.int32, torch.int64):
        wrong = ours != theirs
    else:
        error = (ours.double() - theirs.double()).abs()
        close = (error <= atol + rtol * theirs.double().abs()) & error.isfinite()
        wrong = ~((ours == theirs) | close)
    if wrong.any():
        allowed = [f"{value:g}{name}" for value, name in ((atol, ""), (rtol, " of its size")) if value]
        within = f"each may be off by {' + '.join(allowed)}" if allowed else ""
        raise AssertionError(_report(ours, theirs, wrong, what, axes, within))


def _report(
    got: torch.Tensor, want: torch.Tensor, wrong: torch.Tensor, what: str, axes: Sequence[str], within: str
) -> str:
    place = tuple(wrong.nonzero()[0].tolist())
    named = "".join(f", {_axis(axes, depth)} {index}" for depth, index in enumerate(place))
    lines = [f"{what}{named}: expected {_number(want[place])}, got {_number(got[place])}"]
    counts = f"{int(wrong.sum()):,} of {wrong.numel():,} elements are wrong"
    shape = " × ".join(f"{size} {_axis(axes, depth)}" for depth, size in enumerate(wrong.shape))
    if wrong.numel() > 1:
        lines.append(f"{counts} ({shape})" + (f"; {within}" if within else ""))
    lines += [text for depth in range(wrong.ndim) if (text := _pattern(wrong, depth, _axis(axes, depth)))]
    if not lines[2:] and wrong.numel() > 1 and wrong.all():
        lines.append("none is right")
    if got.is_floating_point() and got.isnan().any():
        lines.append(f"{int(got.isnan().sum()):,} are NaN: computed from memory that was never written, or from 0 / 0")
    return "\n".join(lines)


def _pattern(wrong: torch.Tensor, depth: int, name: str) -> str:
    """Which indices of one dimension hold wrong elements; nothing where all of them do."""
    flat = wrong.movedim(depth, 0).flatten(1) if wrong.ndim > 1 else wrong[:, None]
    some, every = flat.any(1), flat.all(1)
    if some.all() or len(some) == 1:
        return ""
    right, bad = (~some).nonzero()[:, 0].tolist(), some.nonzero()[:, 0].tolist()
    amount = "all of" if bool(every[bad].all()) and flat.shape[1] > 1 else "in"
    amount = "" if flat.shape[1] == 1 else f"{amount} "
    return f"wrong: {amount}{name} {_ranges(bad)}; right: {name} {_ranges(right)}"


def _ranges(indices: list[int]) -> str:
    """0-3, 7, 9-12; of many only the first."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return ", ".join(texts[:6]) + (" …" if len(texts) > 6 else "")


def _first_difference(got: Any, want: Any) -> tuple[tuple[Any, ...], str | None]:
    """The place of the first difference between nested lists, tuples and mappings, and what it is; None if equal."""
    if isinstance(got, list | tuple) and isinstance(want, list | tuple) and type(got) is type(want):
        for index, (one, other) in enumerate(zip(got, want, strict=False)):
            place, difference = _first_difference(one, other)
            if difference is not None:
                return (index, *place), difference
        if len(got) != len(want):
            return (), f"expected {len(want)} entries, {_shown(want)}; got {len(got)}, {_shown(got)}"
        return (), None
    if isinstance(got, Mapping) and isinstance(want, Mapping) and got.keys() == want.keys():
        for key in want:
            place, difference = _first_difference(got[key], want[key])
            if difference is not None:
                return (key, *place), difference
        return (), None
    return (), None if got == want else f"expected {_shown(want)}, got {_shown(got)}"


def _axis(axes: Sequence[str], depth: int) -> str:
    return axes[depth] if depth < len(axes) else "index" if len(axes) <= 1 else f"axis {depth}"


def _number(value: torch.Tensor) -> str:
    number = value.item()
    return f"{number:.6g}" if isinstance(number, float) else str(number)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]} …"

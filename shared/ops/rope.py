"""Rotary position embedding. Introduced in phase 1a.

Su et al., "RoFormer", arXiv 2104.09864, in the half-split layout of the Hugging Face checkpoints: dimension ``i`` is
rotated together with ``i + D/2``. The frequencies may be scaled for longer contexts: ``linear`` divides all of them
(Chen et al., arXiv 2306.15595); ``llama3`` divides the low ones, keeps the high ones and blends between (Llama 3.1);
``yarn`` does the same with a different blend, and also enlarges queries and keys, since softmax over more keys needs
larger scores (Peng et al., arXiv 2309.00071). Invariant: angles, cosines and sines are fp32, and so is the rotation;
only its result is rounded to the input's dtype.
"""

import math

import torch

from shared.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Angle per position of each rotated pair: fp32 ``[D/2]``, fastest first."""
    periods = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)  # positions per radian
    frequencies = 1.0 / periods
    if rope.kind == "default":
        return frequencies
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3_frequencies(rope, frequencies)
    if rope.kind == "yarn":
        return _yarn_frequencies(rope, periods)
    raise ValueError(f"RoPE kind {rope.kind!r} is not implemented; there are default, linear, llama3 and yarn")


def _llama3_frequencies(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Llama 3.1's stretching: ``frequencies`` fp32 ``[D/2]`` to fp32 ``[D/2]``, by their wavelengths in positions."""
    # exercise 01ax5: stretch the long wavelengths, keep the short ones, blend between
    # hint: a frequency f has wavelength 2π / f positions; compare it with original_max_position / factor
    wavelengths = 2 * math.pi / frequencies
    longest_kept = rope.original_max_position / rope.high_freq_factor
    shortest_scaled = rope.original_max_position / rope.low_freq_factor
    # 0 at the longest wavelength, which is fully scaled; 1 at the shortest, which is unchanged.
    blend = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    scaled = torch.where(wavelengths > shortest_scaled, frequencies / rope.factor, blended)
    return torch.where(wavelengths < longest_kept, frequencies, scaled)
    # end exercise


def _yarn_frequencies(rope: RopeConfig, periods: torch.Tensor) -> torch.Tensor:
    """YaRN's stretching: ``periods`` fp32 ``[D/2]`` to frequencies fp32 ``[D/2]``, depending on how often a pair turns.

    Pairs with more than ``beta_fast`` turns within the original positions are kept, those with fewer than ``beta_slow``
    are divided by ``factor``; in between, the kept share falls with the pair's index. The result is rounded as
    transformers rounds it, since errors grow with the position.
    """
    D = 2 * len(periods)

    def pair(num_turns: float) -> float:
        """The fractional index at which a pair would make this many turns."""
        return D * math.log(rope.original_max_position / (num_turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, D - 1)
    kept = 1 - ((torch.arange(D // 2) - first) / (last - first or 0.001)).clamp(0, 1)
    return 1.0 / (rope.factor * periods) * (1 - kept) + 1.0 / periods * kept


def rope_table(
    rope: RopeConfig, head_dim: int, num_positions: int, device: torch.device | str | None = None
) -> torch.Tensor:
    """The RoPE table: fp32 ``[num_positions, 2, 1, D]``, for each position D cosines and D signed sines.

    Both halves of a head rotate by the same angles; the table holds the sign of the sine (minus for the first half,
    plus for the second), so a rotation is two products and a sum. Its numbers are multiplied by ``attention_factor``,
    so a rotated key contains the factor once, even if later rotations move the key.
    """
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inverse_frequencies(rope, head_dim)
    table = torch.empty(num_positions, 2, 1, head_dim, dtype=torch.float32)
    cos, sin = table.squeeze(2).unbind(1)
    torch.cos(angles, out=cos[:, : head_dim // 2])
    torch.sin(angles, out=sin[:, head_dim // 2 :])
    cos[:, head_dim // 2 :] = cos[:, : head_dim // 2]
    sin[:, : head_dim // 2] = -sin[:, head_dim // 2 :]
    return table.mul_(rope.attention_factor).to(device)


def rotate(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rotate each head of each token by its position: element i and element i + D/2 are a point in the plane.

    Args:
        x: ``[T, heads, D]`` in any floating dtype; the result has its shape and dtype.
        rows: ``[T, 2, 1, D]``, the rows of :func:`rope_table` at the tokens' positions.
    """
    # exercise 01ax3: rotate each head by the angles of its position
    # hint: roll by D/2 swaps the halves of a head; the table's sines carry the signs
    cos, sin = rows.unbind(1)  # [T, 1, D] each
    h = x.float()
    return torch.addcmul(h * cos, h.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)
    # end exercise

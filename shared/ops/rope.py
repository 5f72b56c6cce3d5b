"""Rotary position embedding. Introduced in phase 1a.

Su et al., "RoFormer", arXiv 2104.09864, in the half-split layout of the Hugging Face checkpoints: dimension ``i`` is
rotated together with ``i + D/2``. The frequencies may be scaled for longer contexts: ``linear`` divides all of them
(Chen et al., arXiv 2306.15595); ``llama3`` divides the low ones, keeps the high ones and blends between (Llama 3.1).
Invariant: angles, cosines and sines are fp32, and so is the rotation; only its result is rounded to the input's dtype.
"""

import math

import torch

from shared.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Angle per position of each rotated pair: fp32 ``[D/2]``, the fastest first."""
    frequencies = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.kind == "default":
        return frequencies
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3_frequencies(rope, frequencies)
    raise ValueError(f"RoPE kind {rope.kind!r} is not implemented; there are default, linear and llama3")


def _llama3_frequencies(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Llama 3.1's stretching: ``frequencies`` fp32 ``[D/2]`` to fp32 ``[D/2]``, by their wavelengths in positions."""
    # exercise 01ax5: stretch the long wavelengths, keep the short ones, blend between
    # hint: a frequency f has wavelength 2π / f positions; compare it with original_max_position / factor
    wavelengths = 2 * math.pi / frequencies
    longest_kept = rope.original_max_position / rope.high_freq_factor
    shortest_scaled = rope.original_max_position / rope.low_freq_factor
    # 0 at the longest wavelength, scaled in full; 1 at the shortest, unchanged.
    blend = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    scaled = torch.where(wavelengths > shortest_scaled, frequencies / rope.factor, blended)
    return torch.where(wavelengths < longest_kept, frequencies, scaled)
    # end exercise


def rope_table(
    rope: RopeConfig, head_dim: int, num_positions: int, device: torch.device | str | None = None
) -> torch.Tensor:
    """The RoPE table: fp32 ``[num_positions, 2, 1, D]``, for each position D cosines and D signed sines.

    Both halves of a head rotate by the same angles; the table holds the sign of the sine (minus for the first half,
    plus for the second), so a rotation is two products and a sum.
    """
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inverse_frequencies(rope, head_dim)
    table = torch.empty(num_positions, 2, 1, head_dim, dtype=torch.float32)
    cos, sin = table.squeeze(2).unbind(1)
    torch.cos(angles, out=cos[:, : head_dim // 2])
    torch.sin(angles, out=sin[:, head_dim // 2 :])
    cos[:, head_dim // 2 :] = cos[:, : head_dim // 2]
    sin[:, : head_dim // 2] = -sin[:, head_dim // 2 :]
    return table.to(device)


def rotate(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rotate each head of each token by its position: element i and element i + D/2 are a point of the plane.

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

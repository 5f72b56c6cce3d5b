"""Computes whole texts, and mask tokens at chosen positions in them, in two forwards with gradients. Introduced in
phase 11.1.

Real tokens never see mask tokens, so their keys and values do not depend on the adapter. One forward without gradients
computes them. A second one computes groups of mask tokens after chosen tokens (the *anchors*) against these keys. Only
the second forward, which covers a fraction of the text, is differentiated.

Invariant: the hidden states of an anchor's masks are those of a step in which the anchor is a real token.
"""

import torch
from torch import Tensor

from shared.models.causal_lm import CausalLM
from shared.models.tokens import QueryKeyTransform, Tokens
from shared.ops.attention import sdpa_without_cudnn
from shared.tracks.multi_token.lora import FIRST_MASK


class TextView:
    """The KV view of N texts of S tokens; keeps keys and values ``[N, Hkv, S, D]`` of each layer."""

    def __init__(self, num_texts: int) -> None:
        self.num_texts = num_texts
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.masks: dict[int | None, Tensor] = {}  # by window

    def write(self, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, qk: QueryKeyTransform) -> Tensor:
        q, k = qk(q, k, positions)
        self.keys[layer], self.values[layer] = self._by_text(k), self._by_text(v)
        return q

    def attend(self, layer: int, q: Tensor, *, scale: float, window: int | None, softcap: float | None) -> Tensor:
        k, v = self._seen(layer)
        if window not in self.masks:
            self.masks[window] = self._mask(k.shape[2], window, q.device)
        out = batched_attention(self._by_text(q), k, v, self.masks[window], scale, softcap)
        return out.transpose(1, 2).flatten(0, 1)

    def _seen(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values ``[N, Hkv, S, D]`` that the tokens may see."""
        return self.keys[layer], self.values[layer]

    def _mask(self, num_keys: int, window: int | None, device: torch.device) -> Tensor:
        """Which of the keys each token sees, bool ``[T, num_keys]``."""
        places = torch.arange(num_keys, device=device)
        distance = places[:, None] - places[None, :]
        return (distance >= 0) & (distance < (window or num_keys))

    def _by_text(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (self.num_texts, -1)).transpose(1, 2)


class MaskView(TextView):
    """The KV view of mask tokens after the anchors of texts already read.

    Args:
        texts: what the texts' forward has stored.
        anchors: int64 ``[A]``, indices of tokens; the same in all texts.
        num_masks: k, the number of mask tokens after each anchor.
    """

    def __init__(self, texts: TextView, anchors: Tensor, num_masks: int) -> None:
        super().__init__(texts.num_texts)
        self.texts, self.num_masks = texts, num_masks
        self.anchors = anchors.repeat_interleave(num_masks)  # [A · k]
        self.positions = self.anchors + 1 + torch.arange(num_masks, device=anchors.device).repeat(len(anchors))

    def _seen(self, layer: int) -> tuple[Tensor, Tensor]:
        (k, v), (own_k, own_v) = self.texts._seen(layer), super()._seen(layer)
        return torch.cat((k, own_k), dim=2), torch.cat((v, own_v), dim=2)

    def _mask(self, num_keys: int, window: int | None, device: torch.device) -> Tensor:
        places = torch.arange(num_keys - len(self.anchors), device=device)
        of_text = places[None, :] <= self.anchors[:, None]
        if window is not None:
            of_text &= places[None, :] > self.positions[:, None] - window
        of_group = self.anchors[None, :] == self.anchors[:, None]
        return torch.cat((of_text, of_group & (self.positions[None, :] <= self.positions[:, None])), dim=1)


def batched_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Attention of q ``[N, Hq, T, D]`` over k and v ``[N, Hkv, S, D]`` with a mask bool ``[T, S]``."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    if softcap is None:
        return sdpa_without_cudnn(q, k, v, attn_mask=mask, scale=scale)
    scores = softcap * torch.tanh((q @ k.mT).float() * scale / softcap)
    return scores.masked_fill(~mask, float("-inf")).softmax(-1).to(q.dtype) @ v


@torch.no_grad()
def read(model: CausalLM, ids: Tensor) -> tuple[Tensor, TextView]:
    """Hidden states ``[N, S, H]`` of texts ``[N, S]`` after the final norm, and their keys and values."""
    N, S = ids.shape
    view = TextView(N)
    positions = torch.arange(S, device=ids.device).repeat(N)
    hidden = model(Tokens(ids.flatten(), positions), view)
    return model.norm(hidden).view(N, S, -1), view


def look_ahead(model: CausalLM, texts: TextView, anchors: Tensor, num_masks: int) -> Tensor:
    """Hidden states ``[N, A, k, H]`` after the final norm of masks after the anchors ``[A]``; ``model`` is adapted."""
    view = MaskView(texts, anchors, num_masks)
    N, A = texts.num_texts, len(anchors)
    ids = (FIRST_MASK + torch.arange(num_masks, device=anchors.device)).repeat(N * A)
    gate = torch.ones(len(ids), device=anchors.device)
    hidden = model(Tokens(ids, view.positions.repeat(N), gate), view)
    return model.norm(hidden).view(N, A, num_masks, -1)

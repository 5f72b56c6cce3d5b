"""The reference for requests made of segments: one forward over all tokens, with an explicit mask."""

from itertools import accumulate

import torch

from shared.models.causal_lm import CausalLM
from shared.models.tokens import QueryKeyTransform, Tokens


class Masked:
    """The reference: all tokens at their global positions, and a mask that says which token attends to which."""

    def __init__(self, mask: torch.Tensor) -> None:
        self.mask = mask  # bool [T, T]

    def write(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        qk: QueryKeyTransform,
    ) -> torch.Tensor:
        q, self.k = qk(q, k, positions)
        self.v = v
        return q

    def attend(
        self, layer: int, q: torch.Tensor, *, scale: float, window: int | None = None, softcap: float | None = None
    ) -> torch.Tensor:
        T, Hq, _ = q.shape
        k, v = (x.repeat_interleave(Hq // x.shape[1], 1) for x in (self.k, self.v))
        scores = torch.einsum("thd,shd->hts", q, k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        place = torch.arange(T, device=q.device)
        sees = self.mask if window is None else self.mask & (place[None, :] > place[:, None] - window)
        return torch.einsum("hts,shd->thd", scores.masked_fill(~sees, -torch.inf).softmax(-1), v)


def block_diagonal(lengths: list[int], num_own: int) -> torch.Tensor:
    """Each token attends to its own segment up to itself; those after the segments to all before them."""
    T = sum(lengths) + num_own
    mask = torch.ones(T, T, dtype=torch.bool).tril()
    for start, end in zip([0, *accumulate(lengths)][:-1], accumulate(lengths), strict=True):
        mask[start:end, :start] = False
    return mask


@torch.inference_mode()
def reference_logits(model: CausalLM, segments: list[list[int]], own: list[int]) -> torch.Tensor:
    """Logits ``[len(own), V]`` of the tokens after the segments."""
    ids = [token_id for segment in segments for token_id in segment] + own
    device = model.norm.weight.device
    view = Masked(block_diagonal([*map(len, segments)], len(own)).to(device))
    hidden = model(Tokens(torch.tensor(ids, device=device), torch.arange(len(ids), device=device)), view)
    return model.logits(hidden[-len(own) :])

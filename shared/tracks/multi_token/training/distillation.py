"""Trains an adapter on texts that the model generates. Introduced in phase 11.1.

At an anchor, which is a token of a text, mask j stands for the j-th token after the anchor and must predict the token
that follows it. The teacher is the model itself: the target is its logits at the masked token, from reading the text.
The losses, after Samragh et al. (arXiv 2507.11851):

    base      cross-entropy of the teacher's distribution and the model's head on the mask's hidden state
    sampler   the same with the sampler head, which also gets the token before
    latent    squared distance of the mask's hidden state and the teacher's, relative to the teacher's square

Invariants: the model's own parameters do not change; an interrupted and resumed run takes the same steps as an
uninterrupted one.
"""

import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.errors import ConfigError
from shared.kernels.products.tiling import MAX_ROWS
from shared.models.causal_lm import CausalLM
from shared.tracks.multi_token.adapter import Adapter
from shared.tracks.multi_token.training.look_ahead import look_ahead, read
from shared.tracks.multi_token.training.own_texts import Texts
from shared.tracks.multi_token.training.step import Losses, TrainingStep

CHECKPOINT = "training.pt"
LEAST_RATE = 0.05
"""Share of the learning rate that is left at the end of its cosine."""
WARM_UP = 0.03
"""Share of the training in which the learning rate rises."""


@dataclass(frozen=True)
class TrainingConfig:
    """How an adapter is trained."""

    steps: int = 10_000
    minutes: float | None = None  # of training; the learning rate decays over them
    rows: int = 32  # texts per step
    anchors: int = 32  # anchors per row
    learning_rate: float = 1e-3
    seed: int = 0
    measure_every: int = 500  # steps, and checkpoints


class Measured(NamedTuple):
    """How good an adapter is on held-out texts, which were generated greedily."""

    loss: float
    accepted: tuple[float, ...]  # share of anchors whose first 1, 2, … k guesses are all correct
    judged: int  # anchors

    @property
    def tokens_per_step(self) -> float:
        """Expected tokens per step: the accepted guesses plus one sampled token."""
        return 1 + sum(self.accepted)


def losses(model: CausalLM, adapter: Adapter, texts: Texts, anchors: Tensor) -> Losses:
    """The losses at the anchors of all texts, over the positions whose next token the model wrote."""
    return _losses(model, adapter, _predict(model, adapter, texts, anchors))


@torch.no_grad()
def measure(model: CausalLM, adapter: Adapter, texts: Texts, num_anchors: int) -> Measured:
    """Measure on texts, row by row, at evenly spaced anchors."""
    k, length = adapter.config.num_masks, texts.ids.shape[1]
    places = torch.linspace(0, length - 2 - k, min(num_anchors, length - 1 - k), device=model.device).long()
    total, right, judged = 0.0, torch.zeros(k), 0
    for ids, is_answer in zip(texts.ids.split(1), texts.is_answer.split(1), strict=True):
        predicted = _predict(model, adapter, Texts(ids, is_answer), places)
        total += float(sum(_losses(model, adapter, predicted)))
        next_ids = ids[:, places[:, None] + 2 + torch.arange(k, device=places.device)].view(-1, k)
        is_judged = predicted.weights.view(-1, k).bool().all(1)
        is_right = (predicted.logits.argmax(-1).view(-1, k) == next_ids).cumprod(1)
        right += is_right[is_judged].sum(0).cpu()
        judged += int(is_judged.sum())
    return Measured(total / len(texts.ids), tuple((right / max(judged, 1)).tolist()), judged)


def train(
    model: CausalLM,
    adapter: Adapter,
    texts: Texts,
    held_out: Texts,
    config: TrainingConfig,
    work: Path,
    *,
    pause_after: float | None = None,
    report: Callable[[dict[str, Any]], None] = lambda _: None,
) -> list[dict[str, Any]] | None:
    """Train an adapter that is attached to the model. Returns the curve, or None if the run is paused.

    Args:
        model: has the adapter; only the adapter's parameters require gradients.
        work: a folder for the checkpoint. A run with a checkpoint there is resumed.
        pause_after: minutes after which this call writes a checkpoint and returns.
        report: gets each entry of the curve: step, losses, acceptance, steps per second.

    Raises ConfigError if the checkpoint belongs to a different training, or a row is too short for the masks.
    """
    k, length = adapter.config.num_masks, texts.ids.shape[1]
    if length < k + 3:
        raise ConfigError(f"A row has {length} tokens and there are {k} masks; a row needs {k + 3} at least.")
    if model.device.type == "cuda" and config.rows * config.anchors * k <= MAX_ROWS:
        raise ConfigError(
            f"A step has {config.rows} rows of {config.anchors} anchors with {k} masks each; a GPU needs more than "
            f"{MAX_ROWS} masks, since the kernels for fewer rows have no gradients."
        )
    texts, held_out = (Texts(t.ids.to(model.device), t.is_answer.to(model.device)) for t in (texts, held_out))
    step = TrainingStep(partial(losses, model, adapter), adapter.parameters(), config.learning_rate)
    optimizer = step.optimizer
    state = _Progress(0, 0.0, [])
    path = work / CHECKPOINT
    if path.exists():
        state = _resume(path, adapter, optimizer, config)
    started, before = time.monotonic(), state.seconds
    num_measured = state.step
    last = time.monotonic()
    while True:
        state.seconds = before + time.monotonic() - started
        share = state.step / config.steps
        if config.minutes is not None:
            share = max(share, state.seconds / 60 / config.minutes)
        is_done = share >= 1
        is_paused = pause_after is not None and time.monotonic() - started > 60 * pause_after
        is_due = state.step > num_measured and state.step % config.measure_every == 0
        if is_done or is_paused or is_due or (state.step == 0 and not state.curve):
            speed = (state.step - num_measured) / max(time.monotonic() - last, 1e-9)
            measured = measure(model, adapter, held_out, 4 * config.anchors)
            entry: dict[str, Any] = {
                "step": state.step,
                "seconds": round(state.seconds, 1),
                "held_out_loss": measured.loss,
            }
            entry |= {"accepted": list(measured.accepted), "tokens_per_step": measured.tokens_per_step}
            entry |= {"losses": state.recent, "steps_per_second": speed}
            state.curve.append(entry)
            _save(path, adapter, optimizer, config, state)
            report(entry)
            num_measured, last = state.step, time.monotonic()
        if is_done or is_paused:
            return state.curve if is_done else None
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + state.step)
        rows = torch.randint(len(texts.ids), (config.rows,), generator=generator).to(model.device)
        anchors = torch.randperm(length - 1 - k, generator=generator)[: config.anchors].sort().values.to(model.device)
        batch = Texts(texts.ids[rows], texts.is_answer[rows]), anchors
        found = step(*batch, config.learning_rate * rate(share))
        state.step += 1
        if state.step % 20 == 0 or state.step == 1:  # this synchronizes with the device
            state.recent = {name: round(float(value), 4) for name, value in found._asdict().items()}


def rate(share: float) -> float:
    """The learning-rate factor at a given fraction of the training: a short warm-up, then a cosine."""
    if share < WARM_UP:
        return 0.1 + 0.9 * share / WARM_UP
    fall = 0.5 * (1 + math.cos(math.pi * min(1.0, (share - WARM_UP) / (1 - WARM_UP))))
    return LEAST_RATE + (1 - LEAST_RATE) * fall


@dataclass
class _Progress:
    step: int
    seconds: float
    curve: list[dict[str, Any]]
    recent: dict[str, float] | None = None


class _Predicted(NamedTuple):
    """Of n masks."""

    hidden: Tensor  # [n, H], after the final norm
    teacher: Tensor  # [n, H], the teacher's, of the masked tokens
    logits: Tensor  # fp32 [n, V], from the sampler head
    weights: Tensor  # [n], 1 where the model wrote the token after the masked one


def _predict(model: CausalLM, adapter: Adapter, texts: Texts, anchors: Tensor) -> _Predicted:
    k = adapter.config.num_masks
    of_text, view = read(model, texts.ids)
    hidden = look_ahead(model, view, anchors, k).flatten(0, 2)
    places = anchors[:, None] + 1 + torch.arange(k, device=anchors.device)  # [A, k], the masked tokens
    embedded = model.embedding(texts.ids[:, places].flatten())
    logits = _capped(F.linear(adapter.head(embedded, hidden), _head(model)).float(), adapter)
    weights = texts.is_answer[:, places + 1].flatten().float()
    return _Predicted(hidden, of_text[:, places].flatten(0, 2), logits, weights)


def _losses(model: CausalLM, adapter: Adapter, predicted: _Predicted) -> Losses:
    hidden, teacher, logits, weights = predicted
    with torch.no_grad():
        target = _capped(F.linear(teacher, _head(model)).float(), adapter).softmax(-1)
    base = _capped(F.linear(hidden, _head(model)).float(), adapter)
    total = weights.sum().clamp(min=1)
    cross = [-((target * scores.log_softmax(-1)).sum(-1) * weights).sum() / total for scores in (base, logits)]
    distance = (hidden.float() - teacher.float()).square().mean(-1) / teacher.float().square().mean(-1)
    return Losses(cross[0], cross[1], (distance * weights).sum() / total)


def _head(model: CausalLM) -> Tensor:
    weight = model.head.weight
    assert isinstance(weight, Tensor)
    return weight


def _capped(logits: Tensor, adapter: Adapter) -> Tensor:
    cap = adapter.shape.logit_softcap
    return logits if cap is None else cap * torch.tanh(logits / cap)


def _save(path: Path, adapter: Adapter, optimizer: Any, config: TrainingConfig, state: _Progress) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    kept = {"config": asdict(config), "adapter": adapter.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(kept | {"progress": asdict(state)}, part)
    os.replace(part, path)


def _resume(path: Path, adapter: Adapter, optimizer: Any, config: TrainingConfig) -> _Progress:
    kept = torch.load(path, map_location=adapter.masks.device, weights_only=True)
    if kept["config"] != asdict(config):
        changed = [name for name, value in asdict(config).items() if kept["config"].get(name) != value]
        raise ConfigError(
            f"{path} is of a training with other settings ({', '.join(changed)}); use those, or another folder."
        )
    adapter.load_state_dict(kept["adapter"])
    optimizer.load_state_dict(kept["optimizer"])
    return _Progress(**kept["progress"])

"""Layer-by-layer comparison of a model's activations with transformers'. Introduced in phase 1b.

When logits differ, the question is where the difference begins. Both models run the same tokens; after every module of
every layer the two activations are compared. Each of our layers starts from the reference's hidden states, so an error
stays in its layer, bounds are as tight in the last layer as in the first, and the first module over its bound is the
suspect. A free run of our model gives the drift (the error accumulated in its own hidden states) and the final logits.

Invariant: neither model is changed; hooks are always removed.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from shared.cache.view.uncached import UncachedView
from shared.errors import ConfigError
from shared.models.causal_lm import CausalLM
from shared.models.families import FAMILIES
from shared.models.tokens import Tokens
from shared.parity.thresholds import THRESHOLDS, Distance, distance

HEADS_FIRST = (
    "gemma3_text",
)  # transformers norms this family's queries and keys as [Hq, T, D], and the others' as [T, Hq, D]


@dataclass(frozen=True)
class Point:
    """A comparison point: the input or the output of ``module``, which is the result of ``name``."""

    name: str
    module: str
    is_input: bool = False


@dataclass(frozen=True)
class ModuleDiff:
    """One module's activations on both sides; ``layer`` is None outside the layers."""

    layer: int | None
    name: str
    distance: Distance
    limit: float

    @property
    def is_over(self) -> bool:
        """Over its bound, or not a number."""
        return not self.distance.relative <= self.limit

    @property
    def path(self) -> str:
        """``layer 3, mlp.gate_proj``, or the name alone outside the layers."""
        return self.name if self.layer is None else f"layer {self.layer}, {self.name}"


@dataclass(frozen=True)
class Comparison:
    """``modules`` in the order of computation, the logits last; ``drift`` of the hidden states after each layer."""

    modules: tuple[ModuleDiff, ...]
    drift: dict[int, Distance]

    @property
    def first_over(self) -> ModuleDiff | None:
        """The first module over its bound; None if all agree."""
        return next((diff for diff in self.modules if diff.is_over), None)


def points(family: str) -> tuple[Point, ...]:
    """The points of a family's layer, in the order of computation."""
    names = FAMILIES[family].layer_names
    sandwich = "post_attention_norm" in names
    found = [
        Point("attention_norm", "attention_norm"),
        *(Point(f"attention.{proj}", f"attention.qkv.{proj}") for proj in ("q_proj", "k_proj", "v_proj")),
        *(Point(norm, norm) for norm in ("attention.qk.q_norm", "attention.qk.k_norm") if norm in names),
        Point("attention.core", "attention.o_proj", is_input=True),
    ]
    if sandwich:
        found += [
            Point("attention.o_proj", "post_attention_norm", is_input=True),
            Point("post_attention_norm", "post_attention_norm"),
            Point("attention residual", "mlp_norm", is_input=True),
        ]
    else:  # o_proj adds the residual
        found += [Point("attention.o_proj", "mlp_norm", is_input=True)]
    found += [
        Point("mlp_norm", "mlp_norm"),
        Point("mlp.gate_proj", "mlp.gate_up.gate_proj"),
        Point("mlp.up_proj", "mlp.gate_up.up_proj"),
        Point("mlp.gated", "mlp.down_proj", is_input=True),
    ]
    if sandwich:
        found += [Point("mlp.down_proj", "post_mlp_norm", is_input=True)]
    return (*found, Point("post_mlp_norm" if sandwich else "mlp.down_proj", ""))  # the block's own output


def check_layers(layers: Sequence[int] | None, num_layers: int) -> Sequence[int]:
    """The requested layers, by default all; raises ConfigError for a layer that the model does not have."""
    if layers is None:
        return range(num_layers)
    for layer in layers:
        if not 0 <= layer < num_layers:
            raise ConfigError(f"layer is {layer}; this model has layers 0 to {num_layers - 1}.")
    return layers


@torch.inference_mode()
def compare_models(
    model: CausalLM,
    reference: Any,
    token_ids: Sequence[int],
    *,
    layers: Sequence[int] | None = None,
    attention_backend: str = "sdpa",
) -> Comparison:
    """Compare ``model`` with transformers' ``reference`` of the same checkpoint and dtype on one sequence.

    Args:
        layers: the layers to compare module by module, ascending; by default all.

    Raises:
        ConfigError: a layer does not exist, or the dtypes differ.
    """
    config = model.config
    layers = check_layers(layers, config.num_layers)
    if model.dtype != reference.dtype:
        raise ConfigError(f"ours is in {model.dtype}, the reference in {reference.dtype}; load both in one dtype.")
    threshold = THRESHOLDS[model.dtype]
    ids = torch.tensor(token_ids, device=model.device)
    tokens = Tokens(ids, torch.arange(len(ids), device=model.device))
    view = UncachedView([len(ids)], attention_backend)

    theirs, expected = _run_reference(reference, ids, config.family, layers)
    diffs: list[ModuleDiff] = []

    def record(layer: int | None, name: str, ours: torch.Tensor, other: torch.Tensor, limit: float) -> None:
        diffs.append(ModuleDiff(layer, name, distance(ours, other), limit))

    record(None, "embedding", model.embedding(ids), theirs[0, "input"], threshold.direct_module)
    for layer in layers:
        block = model.blocks[layer]
        modules = {point: block.get_submodule(point.module) for point in points(config.family)}
        with _captured(modules) as ours:
            block(theirs[layer, "input"], tokens, view)
        for point in modules:
            record(layer, point.name, ours[point], theirs[layer, point.name], threshold.direct_module)
    last = theirs[config.num_layers, "input"]
    record(None, "norm", model.norm(last), theirs[config.num_layers, "norm"], threshold.direct_module)
    record(None, "head", model.logits(last), expected, threshold.direct_module)

    outputs = dict(enumerate(model.blocks))
    with _captured(outputs) as wandered:
        logits = model.logits(model(tokens, view))
    record(None, "logits", logits, expected, threshold.direct_logits)
    drift = {layer: distance(wandered[layer], theirs[layer + 1, "input"]) for layer in outputs}
    return Comparison(tuple(diffs), drift)


def _run_reference(
    reference: Any, ids: torch.Tensor, family: str, layers: Sequence[int]
) -> tuple[dict[tuple[int, str], torch.Tensor], torch.Tensor]:
    """The reference's activations by (layer, point), every layer's ``input``, and its logits ``[T, V]``.

    The final norm counts as an additional layer.
    """
    blocks, names = reference.model.layers, FAMILIES[family].layer_names
    modules: dict[Any, nn.Module] = {}
    for layer, block in enumerate(blocks):
        modules[layer, Point("input", "", is_input=True)] = block
        if layer in layers:
            for point in points(family):
                modules[layer, point] = block.get_submodule(names.get(point.module, point.module))
    modules[len(blocks), Point("input", "", is_input=True)] = reference.model.norm
    modules[len(blocks), Point("norm", "")] = reference.model.norm
    with _captured(modules) as captured:
        logits = reference(ids[None], use_cache=False).logits[0]
    found = {}
    for (layer, point), (activation,) in captured.items():
        if point.module.startswith("attention.qk.") and family in HEADS_FIRST:
            activation = activation.transpose(0, 1)
        found[layer, point.name] = activation
    return found, logits


@contextmanager
def _captured(modules: dict[Any, nn.Module]) -> Iterator[dict[Any, torch.Tensor]]:
    """Capture the inputs (for keys with an input Point) or outputs of the modules while they run."""
    captured: dict[Any, torch.Tensor] = {}
    handles = []

    def keep_input(key: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        captured[key] = args[0] if args else kwargs["hidden_states"]

    def keep_output(key: Any, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        captured[key] = output

    try:
        for key, module in modules.items():
            point = key[1] if isinstance(key, tuple) else key
            if isinstance(point, Point) and point.is_input:
                handles.append(module.register_forward_pre_hook(partial(keep_input, key), with_kwargs=True))
            else:
                handles.append(module.register_forward_hook(partial(keep_output, key)))
        yield captured
    finally:
        for handle in handles:
            handle.remove()

"""What a step costs, as a table of counts: new tokens, context and drafts. Introduced in phase 11.

Decisions that weigh one step against another (how many drafts are worth their rows, how many tokens a chunk may have)
use this table and never read a clock. So the same queue, seed, table, and arrival steps of requests and aborts give the
same schedules. A table belongs to a model's shape, a dtype, a device and software versions. It is derived from bytes
and operations, or measured by ``infer bench step-costs``, which keeps it in the cache folder; an engine measures
nothing.

Derived: a step launches each layer's kernels, reads every weight once, and reads the keys and values of its context;
each new token costs two operations per weight. A CPU reads and computes one after the other, so the two times are
added. A GPU does both at once, but not perfectly: there the step takes the square root of the sum of their squares. A
step with drafts cannot be prepared while the previous step runs, so it also costs the host's work between two steps.
The rates are those that steps reach in our reports (docs/EXPERIMENTS.md).

Invariants: costs never fall as counts grow; a table is immutable, and its ``hash`` covers its whole content.
"""

import hashlib
import json
import math
import os
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from shared.errors import ConfigError
from shared.models.causal_lm import CausalLM

FOLDER = "step-costs"
"""In the cache folder."""
TOKENS = tuple(2**n for n in range(14))
"""The steps of a derived table; the costs of larger ones are extrapolated from the last two."""
HEAD_LAYERS = 6
"""A pass of the output head alone, with a draw, has as many launches as this many layers."""


class Rates(NamedTuple):
    """What a device achieves in steps, not its data sheet's figures."""

    bytes: float  # read a second
    operations: float  # 16-bit matrix operations per second
    layer: float  # seconds for the launches of a layer
    wait: float  # host seconds between two steps that cannot overlap
    exponent: int  # how reading and computing combine; 1: one after the other; more: at the same time


RATES = {"H100": Rates(2.9e12, 6e14, 12e-6, 6e-4, 2), "H200": Rates(3.5e12, 6e14, 12e-6, 6e-4, 2)}
"""Keyed by a part of the GPU's name."""
OTHER_GPU = Rates(0.8e12, 1e14, 12e-6, 6e-4, 2)
CPU = Rates(20e9, 2e11, 2e-4, 1e-4, 1)
"""Two cores: with fp32 weights, a token costs a tenth as much as reading the weights."""


@dataclass(frozen=True)
class StepCosts:
    """A table of seconds. Raises ConfigError for costs that fall as counts grow, or are not numbers."""

    tokens: tuple[int, ...]  # new tokens of a step, ascending from 1; at least two
    seconds: tuple[float, ...]  # seconds of a step with this many new tokens
    key: float = 0.0  # extra seconds per token of context
    wait: float = 0.0  # extra seconds of a step with drafts
    source: str = "derived"  # or measured
    of: Mapping[str, str] = field(default_factory=dict)  # the model, dtype, device and versions it belongs to

    def __post_init__(self) -> None:
        numbers = (*self.tokens, *self.seconds, self.key, self.wait)
        is_table = len(self.tokens) == len(self.seconds) >= 2 and all(map(math.isfinite, numbers))
        if not (
            is_table
            and self.tokens[0] == 1
            and all(low < high for low, high in zip(self.tokens, self.tokens[1:], strict=False))
            and self.seconds[0] > 0
            and all(low <= high for low, high in zip(self.seconds, self.seconds[1:], strict=False))
            and min(self.key, self.wait) >= 0
        ):
            raise ConfigError(
                f"The step costs are {dict(zip(self.tokens, self.seconds, strict=False))}, {self.key} for each token "
                f"of context and {self.wait} for drafts; tokens must ascend from 1, and costs must be positive and not "
                "fall."
            )

    def cost(self, num_tokens: int, context: int = 0, num_drafts: int = 0) -> float:
        """Seconds of a step.

        Args:
            num_tokens: new tokens, drafts included, at least 1.
            context: tokens of all its sequences in the KV cache before the step.
            num_drafts: how many of the new tokens are drafts.
        """
        at = min(bisect_right(self.tokens, num_tokens), len(self.tokens) - 1)
        (low, high), (start, end) = self.tokens[at - 1 : at + 1], self.seconds[at - 1 : at + 1]
        computing = start + (end - start) * (num_tokens - low) / (high - low)
        return computing + self.key * context + (self.wait if num_drafts else 0.0)

    @cached_property
    def hash(self) -> str:
        """Identifies the table in statistics and reports."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:12]

    def to_json(self) -> str:
        """The table as stored in its file."""
        return json.dumps(asdict(self), sort_keys=True, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises ConfigError, or what ``json`` raises, for a text that is not a table."""
        found = json.loads(text)
        try:
            return cls(**found | {name: tuple(found[name]) for name in ("tokens", "seconds")})
        except (KeyError, TypeError) as error:
            raise ConfigError(f"It is no table of step costs: {error}.") from None


def step_costs(model: CausalLM) -> StepCosts:
    """The table of a loaded model: the measured one in the cache folder, else the derived one.

    Raises ConfigError if the measured table's file cannot be read.
    """
    of = identity(model)
    path = table_path(of)
    if not path.exists():
        return derived(model)
    try:
        found = StepCosts.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, ConfigError) as error:
        raise ConfigError(
            f"The step costs in {path} cannot be used: {error} Delete the file, or measure them again with "
            "infer bench step-costs."
        ) from None
    if found.of != of:
        raise ConfigError(f"The step costs in {path} belong to {found.of}, and its name to {of}; delete the file.")
    return found


def save(costs: StepCosts) -> Path:
    """Save a measured table where :func:`step_costs` finds it; returns its file. Raises OSError."""
    path = table_path(costs.of)
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(f".{os.getpid()}")
    written.write_text(costs.to_json() + "\n", encoding="utf-8")
    written.replace(path)
    return path


def derived(model: CausalLM) -> StepCosts:
    """Derives the table from the bytes and operations of a loaded model, as quantized and sharded."""
    num_weights, num_bytes = _weights(model)
    config = model.config
    per_key = 2 * config.num_layers * config.num_kv_heads * config.head_dim * model.dtype.itemsize
    rates = _rates(model.device)
    return _table(rates, config.num_layers, num_weights, num_bytes, model.dtype, per_key, rates.wait, identity(model))


def head_costs(model: CausalLM) -> StepCosts:
    """The table for a pass of the output head alone, whose new tokens are rows; the host also waits before the first
    pass of a step."""
    num_weights, num_bytes = _with_packed(_head_weights(model), *_seen(model.head))
    of = identity(model) | {"part": "head"}
    rates = _rates(model.device)
    return _table(rates, HEAD_LAYERS, num_weights, num_bytes, model.dtype, 0, rates.wait, of)


def identity(model: CausalLM) -> dict[str, str]:
    """What a table belongs to; the bytes of the weights distinguish quantized models and ranks."""
    c = model.config
    shape = f"{c.family} {c.num_layers}x{c.hidden_size}x{c.intermediate_size}, {c.num_heads}/{c.num_kv_heads} heads of "
    is_gpu = model.device.type == "cuda"
    return {
        "model": f"{shape}{c.head_dim}, vocabulary of {c.vocab_size}",
        "weight bytes": str(_weights(model)[1]),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(model.device) if is_gpu else "CPU",
        "torch": torch.__version__,
        "triton": _version("triton"),
    }


def table_path(of: Mapping[str, str]) -> Path:
    """The file of the measured table for ``of``, in ``$INFER_STEP_COSTS`` or else in the cache folder."""
    from shared.checkpoints.demo import cache_folder  # that module fetches models, and engines import this one

    name = hashlib.sha256(json.dumps(dict(of), sort_keys=True).encode()).hexdigest()[:16]
    own = os.environ.get("INFER_STEP_COSTS")
    return (Path(own) if own else cache_folder() / FOLDER) / f"{name}.json"


def _table(
    rates: Rates,
    num_layers: int,
    num_weights: int,
    num_bytes: int,
    dtype: torch.dtype,
    key_bytes: int,
    wait: float,
    of: Mapping[str, str],
) -> StepCosts:
    reading, power = num_bytes / rates.bytes, rates.exponent
    computing = 2 * num_weights / (rates.operations * 2 / dtype.itemsize)
    seconds = tuple(
        _rounded(num_layers * rates.layer + (reading**power + (num_tokens * computing) ** power) ** (1 / power))
        for num_tokens in TOKENS
    )
    return StepCosts(TOKENS, seconds, _rounded(key_bytes / rates.bytes), wait, of=of)


def _rates(device: torch.device) -> Rates:
    if device.type != "cuda":
        return CPU
    name = torch.cuda.get_device_name(device)
    return next((rates for part, rates in RATES.items() if part in name), OTHER_GPU)


def _weights(model: CausalLM) -> tuple[int, int]:
    """The weights that every step reads, and their bytes; an embedding that is not the head does not count."""
    c = model.config
    per_layer = c.hidden_size * (2 * (c.num_heads + c.num_kv_heads) * c.head_dim + 3 * c.intermediate_size)
    found = _seen(model.blocks, model.norm, model.head)
    return _with_packed(c.num_layers * per_layer + _head_weights(model), *found)


def _head_weights(model: CausalLM) -> int:
    """A rank has a shard of the head (phase 12.1)."""
    weight = getattr(model.head, "weight", None)
    return model.config.hidden_size * (model.config.vocab_size if weight is None else len(weight))


def _with_packed(expected: int, count: int, num_bytes: int) -> tuple[int, int]:
    """Weights and bytes, including those that a CPU has packed: these are 16 bits wide and belong to no module."""
    return max(expected, count), num_bytes + 2 * max(expected - count, 0)


def _seen(*parts: torch.nn.Module) -> tuple[int, int]:
    """The weights in modules, and their bytes; 8- or 4-bit matrices (phase 10) are not parameters."""
    weights: list[Any] = [getattr(module, "weight", None) for part in parts for module in part.modules()]
    quantized = [(math.prod(weight.shape), weight.num_bytes) for weight in weights if hasattr(weight, "num_bytes")]
    found = [(parameter.numel(), parameter.nbytes) for part in parts for parameter in part.parameters()] + quantized
    return sum(count for count, _ in found), sum(num_bytes for _, num_bytes in found)


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"

"""From a model's shape to the minimum time of a token (the roofline of Williams, Waterman and Patterson, 2009).

Introduced in phase 3.1. A decode step reads every weight once, and the keys and values of every sequence; it multiplies
each number read by another. Invariants: parameters and bytes are exact; activations, and the arithmetic of norms,
rotations and softmaxes, are ignored, so that a floor remains a floor.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from shared.checkpoints.shapes import SHAPES
from shared.errors import ModelFolderError
from shared.loading.config_json import parse_config, read_config
from shared.loading.resolve import resolve_model
from shared.models.causal_lm import CausalLM
from shared.models.config import ModelConfig
from shared.quantization.weight import QuantizedWeight

MATRICES = ("attention projections", "MLP projections")
PARTS = ("embedding", *MATRICES, "norms and biases", "output head")


@dataclass(frozen=True)
class Floor:
    """The minimum cost of a step: bytes over bandwidth, or FLOPs over the rate of arithmetic, whichever is more."""

    batch: int
    num_bytes: int
    flops: int
    memory_seconds: float
    compute_seconds: float

    @property
    def seconds(self) -> float:
        return max(self.memory_seconds, self.compute_seconds)

    @property
    def is_memory_bound(self) -> bool:
        return self.memory_seconds >= self.compute_seconds

    @property
    def tokens_per_second(self) -> float:
        """At most, for all sequences together."""
        return self.batch / self.seconds


@dataclass(frozen=True)
class DecodeWork:
    """What a decode step of ``batch`` sequences must read and compute; ``context`` is the number of tokens S that a
    sequence's new token sees, including itself.

    The matrices of the blocks may have fewer bits than ``dtype``, including scales (phase 10); everything else has the
    dtype.
    """

    config: ModelConfig
    dtype: torch.dtype
    weight_bits: float | None = None

    @cached_property
    def parameters(self) -> dict[str, int]:
        """Parameters by part, in the order of `PARTS`; a tied head is the embedding and counts nothing."""
        counts = dict.fromkeys(PARTS, 0)
        for name, parameter in CausalLM(self.config, max_positions=1).named_parameters():
            counts[_part(name)] += parameter.numel()
        if self.config.tie_word_embeddings:
            counts["output head"] = 0
        return counts

    @property
    def num_parameters(self) -> int:
        return sum(self.parameters.values())

    def part_bytes(self, part: str) -> int:
        """The bytes of the weights of one of the `PARTS`."""
        bits = self.weight_bits if part in MATRICES and self.weight_bits else 8 * self.dtype.itemsize
        return int(self.parameters[part] * bits / 8)

    @property
    def resident_bytes(self) -> int:
        """The size of the weights."""
        return sum(map(self.part_bytes, PARTS))

    @property
    def weight_bytes(self) -> int:
        """Weights that every step reads whatever its batch: all of them, except an embedding that is not the head."""
        return self.resident_bytes - (0 if self.config.tie_word_embeddings else self.part_bytes("embedding"))

    @property
    def row_bytes(self) -> int:
        """The embedding's row, read for each token unless the table is read anyway, as the head."""
        return 0 if self.config.tie_word_embeddings else self.config.hidden_size * self.dtype.itemsize

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values that one token adds to the memory, in all layers: 2 · layers · Hkv · D · bytes."""
        return len(self.config.windows) * self._layer_kv_bytes

    def kv_bytes(self, context: int) -> int:
        """Keys and values that attention touches for one token; a windowed layer sees no more than its window."""
        return self._seen(context, self.config.windows) * self._layer_kv_bytes

    def mean_kv_bytes(self, first: int, last: int) -> float:
        """The mean of :meth:`kv_bytes` over contexts from ``first`` to ``last``, inclusive."""
        return sum(map(self.kv_bytes, range(first, last + 1))) / (last - first + 1)

    @property
    def matmul_flops(self) -> int:
        """FLOPs of the products with weights, for one token: a multiplication and an addition for each weight."""
        head = self.config.vocab_size * self.config.hidden_size
        return 2 * (self.parameters["attention projections"] + self.parameters["MLP projections"] + head)

    def attention_flops(self, context: int) -> int:
        """FLOPs of scores and weighted sums, for one token: 4 · Hq · D for each token seen, in each layer."""
        return 4 * self.config.num_heads * self.config.head_dim * self._seen(context, self.config.windows)

    def prompt_flops(self, length: int) -> int:
        """FLOPs until the first token of a prompt. In the last layer, tokens before the last need only keys and values,
        and the head multiplies only the last.
        """
        config, inner, last = self.config, self.config.windows[:-1], self.config.windows[-1:]
        layer = 2 * (self.parameters["attention projections"] + self.parameters["MLP projections"]) // config.num_layers
        keys_and_values = 4 * config.hidden_size * config.num_kv_heads * config.head_dim  # of one token, in one layer
        head = 2 * config.vocab_size * config.hidden_size
        products = length * (len(inner) * layer + keys_and_values) + layer - keys_and_values + head
        seen = sum(self._seen(tokens, inner) for tokens in range(1, length + 1)) + self._seen(length, last)
        return products + 4 * config.num_heads * config.head_dim * seen

    def flops(self, context: int, batch: int = 1) -> int:
        """FLOPs of a step: the batch shares no arithmetic."""
        return batch * (self.matmul_flops + self.attention_flops(context))

    def num_bytes(self, context: int, batch: int = 1) -> int:
        """Bytes of a step: the batch shares the weights, and nothing else."""
        return self.weight_bytes + batch * (self.row_bytes + self.kv_bytes(context))

    def floor(self, context: int, bandwidth: float, flops_rate: float, batch: int = 1) -> Floor:
        """The floor on a machine that reads ``bandwidth`` bytes and computes ``flops_rate`` FLOPs per second."""
        num_bytes, flops = self.num_bytes(context, batch), self.flops(context, batch)
        return Floor(batch, num_bytes, flops, num_bytes / bandwidth, flops / flops_rate)

    def turning_batch(self, context: int, bandwidth: float, flops_rate: float) -> int | None:
        """The smallest batch that is compute-bound; None if reading a sequence's keys and values takes longer than its
        arithmetic, so that no batch is large enough.
        """
        per_sequence = self.flops(context) / flops_rate - (self.row_bytes + self.kv_bytes(context)) / bandwidth
        if per_sequence <= 0:
            return None
        return max(1, math.floor(self.weight_bytes / bandwidth / per_sequence) + 1)

    def _seen(self, context: int, windows: Sequence[int | None]) -> int:
        """Tokens, summed over layers with these windows."""
        return sum(context if window is None else min(context, window) for window in windows)

    @property
    def _layer_kv_bytes(self) -> int:
        return 2 * self.config.num_kv_heads * self.config.head_dim * self.dtype.itemsize


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of a model's weights in memory, including quantized ones."""
    weights = [getattr(part, "weight", None) for part in model.modules()]
    quantized = sum(weight.num_bytes for weight in weights if isinstance(weight, QuantizedWeight))
    return sum(parameter.nbytes for parameter in model.parameters()) + quantized


def find_config(model: str) -> tuple[str, ModelConfig]:
    """Name and shape of a model folder, a shape, a known model, or a hub model, of which only the shape is fetched;
    raises ModelFolderError.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder.resolve().name, read_config(folder)
    if model in SHAPES:
        return model, parse_config(dict(SHAPES[model]), f"the shape {model}")
    is_hub_name = model.count("/") == 1 and all(model.split("/")) and not model.startswith((".", "~"))
    try:
        return model, read_config(_hub_config(model) if is_hub_name and not folder.exists() else resolve_model(model))
    except ModelFolderError as error:
        raise ModelFolderError(f"{error} A shape does as well: {', '.join(SHAPES)}.") from None


def _hub_config(name: str) -> Path:
    """The folder into which a hub model's configuration is fetched."""
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(name, "config.json", local_files_only=constants.HF_HUB_OFFLINE)).parent
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError, OSError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
    said = "check the name and the network, or give a model's folder."
    raise ModelFolderError(f"The configuration of {name} could not be fetched from the hub ({reason}); {said}")


def _part(name: str) -> str:
    if name.startswith(("embedding.", "head.")):
        return "embedding" if name.startswith("embedding.") else "output head"
    if name.endswith("_proj.weight"):
        return "attention projections" if ".attention." in name else "MLP projections"
    return "norms and biases"

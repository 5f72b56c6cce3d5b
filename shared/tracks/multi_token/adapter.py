"""The adapter that lets a model predict ahead: LoRA, mask tokens, a sampler head. Introduced in phase 11.1.

An adapter is a folder with ``adapter.json`` (rank, α, targets, number of mask tokens) and ``adapter.safetensors``. It
fits every checkpoint of one shape, in any dtype or quantization.

The sampler head makes independent guesses consistent. The hidden states of all mask tokens come from one forward, so
none of them depends on the tokens sampled for the others. The head takes the token sampled at the previous position
into account (Samragh et al., arXiv 2507.11851): two blocks Linear → SiLU → RMSNorm over [embedding; hidden state],
added to the hidden state. The model's own output head then turns the result into logits.

Invariant: an adapter that does not fit is refused with a list of the mismatches, before anything is changed.
"""

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from shared.engine.config import EngineConfig
from shared.errors import ModelFolderError
from shared.kernels.products import gemv
from shared.kernels.products.rmsnorm import rms_norm
from shared.models.causal_lm import CausalLM
from shared.models.config import ModelConfig
from shared.ops import rmsnorm as op
from shared.tracks.multi_token.lora import TARGETS, GatedLoRA, MaskEmbedding, target_sizes

CONFIG, WEIGHTS = "adapter.json", "adapter.safetensors"
MOST_SHOWN = 8
"""Maximum number of mismatches listed in an error."""


@dataclass(frozen=True)
class AdapterConfig:
    """An adapter's shape, without the model's."""

    rank: int = 16
    alpha: float = 32.0
    target_modules: tuple[str, ...] = tuple(TARGETS)
    num_masks: int = 3  # k: the maximum number of tokens guessed ahead
    num_candidates: int | None = None  # only the first ids of the vocabulary can be guessed; None: all are

    def __post_init__(self) -> None:
        unknown = sorted(set(self.target_modules) - set(TARGETS))
        if unknown:
            raise ValueError(f"target_modules names {', '.join(unknown)}; it may name {', '.join(TARGETS)}.")
        for name in ("rank", "num_masks"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be an integer of at least 1.")
        if self.num_candidates is not None and (type(self.num_candidates) is not int or self.num_candidates < 1):
            raise ValueError(
                f"num_candidates is {self.num_candidates!r}; it must be an integer of at least 1, or left out."
            )


class SamplerHead(nn.Module):
    """Corrects the hidden state of a mask token for the token before it; the identity at first."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        H, self.eps = hidden_size, eps
        self.first = nn.Linear(2 * H, H, bias=False)
        self.second = nn.Linear(H, H, bias=False)
        self.first_norm = nn.Parameter(torch.ones(H))
        self.second_norm = nn.Parameter(torch.zeros(H))

    def forward(self, previous: Tensor, hidden: Tensor) -> Tensor:
        """``[n, H]``, from the embeddings of the previous tokens and the hidden states after the final norm."""
        x = torch.cat((previous, hidden), dim=-1)
        is_training = torch.is_grad_enabled()
        product, normed = (F.linear, op.rms_norm) if is_training else (gemv.linear, rms_norm)
        for linear, norm in ((self.first, self.first_norm), (self.second, self.second_norm)):
            x = product(x, linear.weight.to(x.dtype))
            x = normed(F.silu(x), norm.to(x.dtype), self.eps)
        return hidden + x


class Adapter(nn.Module):
    """The parameters of an adapter for models of one shape, initialized at random."""

    def __init__(self, config: AdapterConfig, shape: ModelConfig) -> None:
        super().__init__()
        self.config, self.shape = config, shape
        sizes = {name: size for name, size in target_sizes(shape).items() if name in config.target_modules}
        self.layers = nn.ModuleList(
            nn.ModuleDict({name: GatedLoRA(*size, config.rank, config.alpha) for name, size in sizes.items()})
            for _ in range(shape.num_layers)
        )
        self.masks = nn.Parameter(torch.zeros(config.num_masks, shape.hidden_size))
        self.head = SamplerHead(shape.hidden_size, shape.rms_norm_eps)

    def additions(self) -> list[dict[str, GatedLoRA]]:
        """The additions of each layer, by the names of their matrices."""
        return [dict(layer.items()) for layer in self.layers]  # type: ignore[operator]

    @torch.no_grad()
    def start_masks(self, embedding: nn.Module) -> None:
        """Initialize the mask tokens with the mean of the model's embeddings, scaled as its blocks expect them."""
        mean = embedding.weight.float().mean(0) * (getattr(embedding, "scale", None) or 1.0)  # type: ignore[operator]
        self.masks.copy_(mean.expand_as(self.masks))

    def logits(self, model: CausalLM, previous: Tensor, hidden: Tensor) -> Tensor:
        """Logits ``[n, V]`` after the tokens ``previous [n]``, from the mask tokens' hidden states ``[n, H]``.

        With ``num_candidates``, the logits from that index on are -inf.
        """
        logits = self.candidate_logits(model, previous, hidden)
        return F.pad(logits, (0, self.shape.vocab_size - logits.shape[1]), value=-torch.inf)

    def candidate_logits(self, model: CausalLM, previous: Tensor, hidden: Tensor) -> Tensor:
        """Only the logits of the first ``num_candidates`` ids; the other rows of an unquantized head are not read."""
        embedding = model.embedding.base if isinstance(model.embedding, MaskEmbedding) else model.embedding
        x, weight = self.head(embedding(previous), model.norm(hidden)), getattr(model.head, "weight", None)
        most = self.config.num_candidates
        if most is not None and isinstance(weight, Tensor):
            logits = gemv.linear(x, weight[:most], None if model.head.bias is None else model.head.bias[:most])
        else:
            logits = model.head(x)[:, :most]
        cap = self.shape.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def save(self, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write the adapter; an existing one is replaced only once the new one is complete."""
        from shared.checkpoints.safetensors_writer import write_safetensors  # engines never write adapters

        folder.mkdir(parents=True, exist_ok=True)
        tensors = self.state_dict()
        layout = [(name, tuple(tensor.shape)) for name, tensor in tensors.items()]
        write_safetensors(folder / f"{WEIGHTS}.part", layout, dtype, tensors.values())
        (folder / CONFIG).write_text(json.dumps(asdict(self.config), indent=2) + "\n", encoding="utf-8")
        os.replace(folder / f"{WEIGHTS}.part", folder / WEIGHTS)


def load_adapter(folder: Path, model: CausalLM, *, dtype: torch.dtype | None = None) -> Adapter:
    """Read an adapter for ``model``, in ``dtype`` (None: the model's), on its device.

    Raises ModelFolderError if it is missing or damaged, or does not fit; the message lists the mismatches.
    """
    adapter = Adapter(read_adapter_config(folder), model.config)
    expected = {name: tuple(tensor.shape) for name, tensor in adapter.state_dict().items()}
    try:
        with safe_open(folder / WEIGHTS, framework="pt", device="cpu") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            misfits = _misfits(expected, found)
            if misfits:
                rest = len(misfits) - MOST_SHOWN
                listed = "".join(f"\n  {line}" for line in misfits[:MOST_SHOWN])
                raise ModelFolderError(
                    f"The adapter {folder} does not fit the model:{listed}"
                    + (f"\n  and {rest} more" if rest > 0 else "")
                    + "\nUse the adapter that was trained for this model, or train one: infer train mtp."
                )
            adapter.load_state_dict({name: file.get_tensor(name) for name in found})
    except (SafetensorError, OSError) as error:
        raise ModelFolderError(f"{folder / WEIGHTS} is not a whole safetensors file ({error}).") from None
    return adapter.to(model.device, dtype or model.dtype).requires_grad_(False).eval()


def read_adapter_config(folder: Path) -> AdapterConfig:
    """The config of an adapter's folder; raises ModelFolderError."""
    path = folder / CONFIG
    try:
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return AdapterConfig(**fields | {"target_modules": tuple(fields["target_modules"])})
    except FileNotFoundError:
        raise ModelFolderError(f"{folder} has no {CONFIG}; give the folder of an adapter (infer train mtp).") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelFolderError(f"{path} is not the config of an adapter: {error}") from None


def with_adapter(config: EngineConfig) -> EngineConfig:
    """The settings, with at most as many drafts as the adapter has mask tokens; raises ModelFolderError."""
    if config.adapter is None:
        return config
    num_masks = read_adapter_config(Path(config.adapter).expanduser()).num_masks
    return replace(config, spec_length=min(config.spec_length, num_masks))


def _misfits(expected: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]]) -> list[str]:
    lines = [
        f"{name} is {list(found[name])} and must be {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    lines += [f"{name} is missing" for name in expected if name not in found]
    return lines + [f"{name} has no place in the model" for name in found if name not in expected]

"""Adapters without training."""

import functools
import tempfile
from pathlib import Path

import torch

from shared.loading.loader import load_model
from shared.models.causal_lm import CausalLM
from shared.tracks.multi_token.adapter import Adapter, AdapterConfig


def random_adapter(model: CausalLM, seed: int = 0, **options: object) -> Adapter:
    """An adapter for a model with random numbers in every part; ``about``: the fields of ``AdapterConfig``."""
    torch.manual_seed(seed)
    adapter = Adapter(AdapterConfig(**options), model.config)  # type: ignore[arg-type]
    for parameter in adapter.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return adapter.requires_grad_(False)


@functools.cache
def random_adapter_of(folder: Path) -> Path:
    """The folder of a random adapter for the model in ``folder``."""
    written = Path(tempfile.mkdtemp(prefix="adapter-"))
    random_adapter(load_model(folder)).save(written, torch.float32)
    return written

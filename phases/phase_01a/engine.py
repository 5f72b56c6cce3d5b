"""One decoder layer of a checkpoint, run on hidden states."""

import torch

from shared.cache.view.uncached import UncachedView
from shared.errors import ConfigError
from shared.loading.checkpoint import Checkpoint
from shared.loading.config_json import read_config
from shared.loading.placement import check_device, default_dtype
from shared.loading.resolve import resolve_model
from shared.loading.weights import fill, layer_sources
from shared.models.families import FAMILIES
from shared.models.tokens import Tokens
from shared.ops.rope import rope_table


class Engine:
    """Layer ``layer`` of a model, and no other part.

    Raises ModelFolderError if the folder cannot be loaded, ConfigError if the model has no such layer.
    """

    def __init__(
        self,
        model: str,
        layer: int = 0,
        *,
        dtype: torch.dtype | None = None,
        device: str = "cpu",
        attention_backend: str = "sdpa",
    ) -> None:
        folder = resolve_model(model)
        self.config = read_config(folder)
        if not 0 <= layer < self.config.num_layers:
            raise ConfigError(f"layer is {layer}; this model has layers 0 to {self.config.num_layers - 1}.")
        self.device = check_device(device)
        self.dtype = dtype or default_dtype(self.config, self.device)
        self.attention_backend = attention_backend

        family = FAMILIES[self.config.family]
        rope, positions = self.config.layer_rope(layer), self.config.max_position_embeddings
        self.block = family.block(self.config, layer, rope_table(rope, self.config.head_dim, positions, self.device))
        fill(self.block, layer_sources(family, self.block, layer), Checkpoint(folder), self.dtype, self.device)

    @torch.inference_mode()
    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states ``[T, H]`` of one sequence at ``positions`` int64 ``[T]``, through the layer: ``[T, H]``."""
        tokens = Tokens(ids=torch.empty(0, dtype=torch.int64), positions=positions.to(self.device))
        x = x.to(self.device, self.dtype)
        return self.block(x, tokens, UncachedView([len(x)], self.attention_backend))

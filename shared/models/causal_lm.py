"""The whole model: embedding, blocks, final norm, output head. Introduced in phase 1b.

One class serves every family; the differences are in the family's block and in its row of ``FAMILIES``. Invariant: the
model has a single path. It receives tokens and a KV view, never requests, and returns hidden states; logits are
computed only for the requested rows.
"""

import torch
import torch.nn.functional as F
from torch import nn

from shared.models.config import ModelConfig, RopeConfig
from shared.models.families import FAMILIES
from shared.models.norm import RMSNorm, empty_parameter
from shared.models.projection import Projection
from shared.models.tokens import KVView, Tokens
from shared.ops.rope import rope_table


class Embedding(nn.Module):
    """Token ids ``[T]`` to vectors ``[T, H]``; Gemma multiplies them by √H, rounded to the weights' dtype."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = empty_parameter(config.vocab_size, config.hidden_size)
        self.scale = config.hidden_size**0.5 if FAMILIES[config.family].scales_embeddings else None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = F.embedding(ids, self.weight)
        return x if self.scale is None else x * torch.tensor(self.scale, dtype=x.dtype)


class CausalLM(nn.Module):
    """A decoder-only language model without weights; ``shared.loading.loader.load_model`` fills it.

    Args:
        max_positions: rows of the RoPE tables; positions must be smaller.
        device: the device of the tables and the weights.
    """

    def __init__(self, config: ModelConfig, max_positions: int, device: torch.device | str = "cpu") -> None:
        super().__init__()
        family = FAMILIES[config.family]
        self.config = config
        self.max_positions = max_positions
        self.embedding = Embedding(config)
        tables: dict[RopeConfig, torch.Tensor] = {}  # layers with the same RoPE share a table
        blocks = []
        for layer in range(config.num_layers):
            rope = config.layer_rope(layer)
            if rope not in tables:
                tables[rope] = rope_table(rope, config.head_dim, max_positions, device)
            blocks.append(family.block(config, layer, tables[rope]))
        self.blocks = nn.ModuleList(blocks)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, family.norm_offset)
        self.head = Projection(config.hidden_size, config.vocab_size)

    def forward(self, tokens: Tokens, kv: KVView, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states of the step's tokens before the final norm, ``[T, H]``, or ``[n, H]`` of the tokens in rows.

        No layer reads what the last one computes, so after its attention only these tokens are computed (phase 4).
        The idea is llama.cpp's.

        Args:
            rows: int64 ``[n]``, at least one; None: all.
        """
        # exercise 01bx1: run the step's tokens through the embedding and every block
        # hint: a block takes the hidden states, the tokens and the view, and returns hidden states
        # hint: the last block also takes rows, and returns the hidden states of these tokens
        *others, last = self.blocks
        x = self.embedding(tokens.ids)
        for block in others:
            x = block(x, tokens, kv)
        return last(x, tokens, kv, rows)
        # end exercise

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[n, V]`` of n rows of hidden states."""
        # exercise 01bx2: final norm, output head, and the softcap if the model has one
        # hint: a projection applies the norm passed as norm= to its input
        logits = self.head(hidden, norm=self.norm)
        cap = self.config.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)
        # end exercise

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

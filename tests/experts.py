"""A family as a reader of the course would add it, in one file: Qwen 3 with a mixture of experts (Qwen3-MoE)."""

from dataclasses import replace

import torch
from torch import nn

from shared.models import qwen3
from shared.models.config import ModelConfig
from shared.models.families import Family
from shared.models.mlp import GatedMLP
from shared.models.norm import RMSNorm
from shared.models.projection import Projection
from shared.models.qwen3 import Qwen3Block
from shared.models.tokens import Tokens

EXPERT = {
    f"mlp.experts.*.{module}": f"mlp.experts.*.{name}"
    for module, name in (
        ("gate_up.gate_proj", "gate_proj"),
        ("gate_up.up_proj", "up_proj"),
        ("down_proj", "down_proj"),
    )
}
LAYER_NAMES = (
    {module: name for module, name in qwen3.LAYER_NAMES.items() if not module.startswith("mlp.")}
    | {"mlp.router": "mlp.gate"}
    | EXPERT
)


class MixtureOfExperts(nn.Module):
    """The weighted sum of a few experts' outputs, chosen for each token by the router."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        num_experts, self.num_chosen = config.own["num_local_experts"], config.own["num_experts_per_tok"]
        expert = replace(config, intermediate_size=config.own["moe_intermediate_size"])
        self.router = Projection(config.hidden_size, num_experts)
        self.experts = nn.ModuleList(GatedMLP(expert) for _ in range(num_experts))

    def forward(
        self, x: torch.Tensor, tokens: Tokens, norm: RMSNorm | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        h = x if norm is None else norm(x)
        weights, chosen = self.router(h).float().softmax(-1).topk(self.num_chosen)  # [T, k] each
        weights = weights / weights.sum(-1, keepdim=True)
        y = torch.zeros_like(h) if residual is None else residual
        for number, expert in enumerate(self.experts):  # all see all tokens, so a step's shapes are fixed
            weight = torch.where(chosen == number, weights, 0.0).sum(-1, keepdim=True)
            y = y + weight.to(h.dtype) * expert(h, tokens)
        return y


class ExpertsBlock(Qwen3Block):
    def __init__(self, config: ModelConfig, layer: int, table: torch.Tensor) -> None:
        super().__init__(config, layer, table)
        self.mlp = MixtureOfExperts(config)  # type: ignore[assignment]


FAMILY = Family(
    ExpertsBlock,
    LAYER_NAMES,
    qwen3.CONFIG_DEFAULTS,
    own_fields=("num_local_experts", "num_experts_per_tok", "moe_intermediate_size"),
)

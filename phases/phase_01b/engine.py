"""The whole model, run once over a prompt."""

from collections.abc import Sequence

import torch

from shared.cache.view.uncached import UncachedView
from shared.engine.prompt import check_prompt
from shared.loading.loader import load_model
from shared.loading.resolve import resolve_model
from shared.models.tokens import Tokens
from shared.text.tokenizer import Tokenizer


class Engine:
    """A model and its tokenizer; parameters as for ``load_model``."""

    def __init__(
        self,
        model: str,
        *,
        dtype: torch.dtype | None = None,
        device: str = "cpu",
        attention_backend: str = "sdpa",
    ) -> None:
        folder = resolve_model(model)
        self.model = load_model(folder, dtype=dtype, device=device)
        self.tokenizer = Tokenizer.load(folder)
        self.attention_backend = attention_backend

    @torch.inference_mode()
    def forward(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits ``[T, V]`` of every position of a sequence of T tokens."""
        ids = check_prompt(token_ids, self.model.config.vocab_size, self.model.max_positions)
        device = self.model.device
        tokens = Tokens(torch.tensor(ids, device=device), torch.arange(len(ids), device=device))
        hidden = self.model(tokens, UncachedView([len(ids)], self.attention_backend))
        return self.model.logits(hidden)

    def top_tokens(self, prompt: str, count: int = 5) -> list[tuple[str, float]]:
        """The most likely next tokens after ``prompt``, as text and probability, in descending order."""
        probabilities = self.forward(self.tokenizer.encode(prompt))[-1].float().softmax(-1)
        best = probabilities.topk(count)
        return [
            (self.tokenizer.decode([i]), p) for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]

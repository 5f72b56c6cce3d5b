"""transformers' ``generate`` as its users get it, timed token by token. Introduced in phase 3.1.

Two ways: ``eager``, a plain call with the cache that grows; ``compiled``, the static cache, for which ``generate``
compiles the decode step by itself (``CompileConfig``: Inductor, CUDA graphs) and only on a GPU. Invariant: nothing of
transformers is replaced or tuned; a streamer notes when each token reaches the host, which ``generate`` waits for in
every step with or without one.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import Run
from shared.parity.reference import load_reference

WAYS = ("eager", "compiled")


class TokenClock:
    """A streamer that notes when each token came, and calls ``on_token`` after each."""

    def __init__(self, on_token: Callable[[], object] | None = None) -> None:
        self.times: list[float] = []
        self.on_token = on_token
        self.has_seen_prompt = False

    def put(self, value: torch.Tensor) -> None:
        """Called once with the prompt, then with each token."""
        if self.has_seen_prompt:
            self.times.append(time.perf_counter())
            if self.on_token is not None:
                self.on_token()
        self.has_seen_prompt = True

    def end(self) -> None:
        """Called after the last token."""


class TransformersPeer:
    """A model folder in transformers, with its default attention (``sdpa``)."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import GenerationConfig

        self.model = load_reference(folder, dtype).to(device)
        self.model.generation_config = GenerationConfig()  # the folder's own would bring its end ids back
        self.device = device

    @property
    def weight_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.model.parameters())

    def settings(self, way: str) -> dict[str, Any]:
        """How ``generate`` is called, for the report."""
        given: dict[str, Any] = {"do_sample": False, "attention": "sdpa"}
        if way == "compiled":
            from transformers import CompileConfig

            given |= {"cache_implementation": "static", "compile_config": CompileConfig().to_dict()}
        return given

    def run(
        self, way: str, prompt_ids: list[int], new_tokens: int, on_token: Callable[[], object] | None = None
    ) -> Run:
        """One greedy answer of exactly ``new_tokens`` tokens, past any end of sequence."""
        from transformers import CompileConfig, GenerationConfig

        more = {"cache_implementation": "static", "compile_config": CompileConfig()} if way == "compiled" else {}
        config = GenerationConfig(do_sample=False, max_new_tokens=new_tokens, pad_token_id=0, **more)
        clock = TokenClock(on_token)
        start = time.perf_counter()
        ids = torch.tensor([prompt_ids], device=self.device)
        found = self.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=clock)
        token_ids = found[0, len(prompt_ids) :].tolist()
        return Run(token_ids, [moment - start for moment in clock.times], len(prompt_ids) + new_tokens - 1)

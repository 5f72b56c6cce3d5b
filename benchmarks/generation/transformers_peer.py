"""transformers' ``generate`` as its users get it, timed token by token. Introduced in phase 3.1.

Two ways: ``eager``, a plain call with the cache that grows; ``compiled``, the static cache, for which ``generate``
compiles the decode step by itself (``CompileConfig``: Inductor, CUDA graphs) and only on a GPU. Invariant: nothing of
transformers is replaced or tuned; a streamer notes when each token reaches the host, which ``generate`` waits for in
every step with or without one.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import Run
from shared.parity.reference import load_reference

WAYS = ("eager", "compiled")


class _Enough(Exception):  # noqa: N818
    """Breaks an answer off."""


class TokenClock:
    """A streamer that notes each token and when it came, and asks ``is_enough``, if given, whether to break off."""

    def __init__(self, is_enough: Callable[[Sequence[float]], bool] | None = None) -> None:
        self.token_ids: list[int] = []
        self.times: list[float] = []
        self.is_enough = is_enough
        self.has_seen_prompt = False

    def put(self, value: torch.Tensor) -> None:
        """Called once with the prompt, then with each token."""
        if self.has_seen_prompt:
            self.times.append(time.perf_counter())
            self.token_ids += value.tolist()
            if self.is_enough is not None and self.is_enough(self.times):
                raise _Enough
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
        self,
        way: str,
        prompt_ids: list[int],
        new_tokens: int,
        is_enough: Callable[[Sequence[float]], bool] | None = None,
    ) -> Run:
        """One greedy answer of ``new_tokens`` tokens, past any end of sequence.

        ``is_enough``, asked after each token with the times of all so far, may break it off.
        """
        from transformers import CompileConfig, GenerationConfig

        more = {"cache_implementation": "static", "compile_config": CompileConfig()} if way == "compiled" else {}
        config = GenerationConfig(do_sample=False, max_new_tokens=new_tokens, pad_token_id=0, **more)
        clock = TokenClock(is_enough)
        start = time.perf_counter()
        ids = torch.tensor([prompt_ids], device=self.device)
        with contextlib.suppress(_Enough):
            self.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=clock)
        computed = len(prompt_ids) + len(clock.token_ids) - 1
        return Run(clock.token_ids, [moment - start for moment in clock.times], computed)

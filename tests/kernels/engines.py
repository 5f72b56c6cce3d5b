"""Engines of a layer or two whose captured steps run in Triton's interpreter too."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from phases.phase_09.engine import Engine
from shared.engine.config import EngineConfig
from shared.engine.executor.captured import Captured
from shared.engine.executor.graphs import CapturedStep, Computed
from shared.engine.executor.last_ids import LastIds
from shared.engine.runner import Runner
from shared.kernels.launch import INTERPRETED
from shared.speculation.drafter import PendingDrafts

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
SMALL: dict[str, Any] = {
    "max_seq_len": 48,
    "max_batch_size": 3,
    "block_size": 4,
    "num_gpu_blocks": 12,
    "prefill_chunk_size": 9,
    "dtype": "float32",
    "device": DEVICE.type,
}
REQUESTS: list[tuple[str | list[int], dict[str, Any]]] = [
    ([5, 9] * 10, {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}),  # chunks of 9, 9 and 2
    ([7], {"seed": 1, "max_new_tokens": 16, "logprobs": 2, "frequency_penalty": 0.7, "ignore_eos": True}),
    ([5, 9] * 8, {"temperature": 0.0, "max_new_tokens": 12, "prompt_logprobs": 1, "ignore_eos": True}),
    ([3] * 6, {"seed": 2, "top_p": 0.9, "max_new_tokens": 3, "ignore_eos": True}),
]


class Repeat:
    """Stands in for a graph where there is no GPU: runs the same function on the same buffers again.

    Like a graph it writes its results to the same memory each time, where nothing must be left of the time before.
    """

    def __call__(self, run: Callable[[], Computed]) -> CapturedStep:
        results = run()

        def replay() -> None:
            for kept, tensor in zip(results, run(), strict=True):
                if kept is not None and tensor is not None:
                    kept.copy_(tensor)

        return CapturedStep(replay, results)


def make_engine(folder: Path, phase: Any = Engine, **config: Any) -> Any:
    """An engine of a layer, or of two whose windows differ; the KV cache of these is poisoned."""
    engine = phase(EngineConfig(model=str(folder), **SMALL | config))
    chosen = slice(1, 3) if engine.model.config.family == "gemma3_text" else slice(1)
    engine.model.blocks = engine.model.blocks[chosen]
    if engine.config.use_cuda_graphs is None:
        sizes = engine.pool.max_sequences, engine.config.most_logit_rows
        engine.runner = captured_runner(engine.model, engine.view, *sizes)
        assert engine.runner.executor.graphs, "a capture that failed would be run eagerly"
        show_drafts(engine)
    for memory in (engine.view.keys, engine.view.values):  # type: ignore[attr-defined]
        memory.zero_()[chosen] = float("nan")
    return engine


def captured_runner(model: Any, view: Any, *sizes: int, **options: Any) -> Runner:
    """A runner whose steps are captured, also in the interpreter."""
    executor = partial(Captured, capture=Repeat() if INTERPRETED else None)
    return Runner(model, view, *sizes, **{"executor": executor, "last_ids": LastIds} | options)


def show_drafts(engine: Any) -> None:
    """A drafter leaves its drafts where the engine's new runner looks for them."""
    if getattr(engine, "drafter", None) is not None:
        engine.drafter.leave_drafts_in(PendingDrafts(engine.runner.last_ids.tensor, engine.pool.max_sequences))

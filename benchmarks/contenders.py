"""Whoever answers in the generation benchmark: a phase's engine, or transformers, with what it keeps in memory.

Introduced in phase 3.1. Invariant: contenders differ only in how they answer. All get the same prompts and as many new
tokens, and each is loaded before the first is timed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.generation.step_trace import TraceWindow
from benchmarks.generation.transformers_peer import TransformersPeer
from benchmarks.timing import Run, run
from shared.engine.config import EngineConfig
from shared.errors import ConfigError
from shared.lessons import Lesson, find_lesson, lessons
from shared.sampling.params import SamplingParams

MIN_DECODED = 8
"""Tokens that an answer has before a bound of seconds may break it off."""


@dataclass
class Contender:
    """One that answers, and that answers once more through a window.

    Bytes: of the ``weights``; of keys and values, None where unknown; ``resident``, all that it holds; ``peak``, the
    most that it held while it answered, None on a CPU. A GPU's are those of PyTorch's allocator, a CPU's the tensors'.
    """

    name: str
    title: str
    answer: Callable[[list[int], int], Run]
    trace: Callable[[list[int], int, TraceWindow], None]
    settings: dict[str, Any]
    weights: int
    kv: int | None
    resident: int
    peak: int | None = None

    @property
    def other(self) -> int | None:
        """What is neither weights nor, where that is known, keys and values; on a GPU activations at their peak too."""
        return max(self.peak or 0, self.resident) - self.weights - (self.kv or 0)


def generating_lessons(numbers: Sequence[str]) -> list[Lesson]:
    """The phases asked for, in their own order, each once; raises ConfigError for one that answers no prompts."""
    asked = {find_lesson(number).number for number in numbers}
    found = [lesson for lesson in lessons() if lesson.number in asked]
    able = ", ".join(lesson.number for lesson in lessons() if lesson.generates)
    if not found:
        raise ConfigError(f"No phase was named; name at least one of {able}, or none at all for the usual ones.")
    for lesson in found:
        if not lesson.generates:
            raise ConfigError(f"Phase {lesson.number} generates no text, so it has no answers; phases that do: {able}.")
    return found


def load_engine(lesson: Lesson, config: EngineConfig, max_seconds: float | None) -> Contender:
    """A phase's engine; its answers break off after ``max_seconds`` of decoding."""
    before = allocated(config.device)
    engine = lesson.engine_alone(config)
    weights = storage_bytes(engine.model.parameters())
    kv = engine.stats().get("cache bytes", 0)

    def answer(prompt_ids: list[int], new_tokens: int) -> Run:
        return run(engine, prompt_ids, new_tokens, MIN_DECODED, max_seconds)

    def trace(prompt_ids: list[int], new_tokens: int, window: TraceWindow) -> None:
        params = SamplingParams(temperature=0.0, max_new_tokens=new_tokens, ignore_eos=True)
        with closing(engine.generate(prompt_ids, params)) as outputs:
            for _ in outputs:
                if not window.token():
                    break

    held = allocated(config.device) - before if is_cuda(config.device) else storage_bytes(held_tensors(engine))
    title = f"phase {lesson.number}: {lesson.title}"
    return Contender(lesson.number, title, answer, trace, {"config": engine.config}, weights, kv, held)


def load_transformers(
    folder: Path, dtype: torch.dtype, device: str, ways: tuple[str, ...], max_seconds: float | None
) -> list[Contender]:
    """transformers in one or both of its ways, on one copy of the weights.

    Answers of the eager way break off after ``max_seconds`` of decoding, but for the first: in it cuDNN plans its
    attention for each length. So does the compiled way compile in its first ones, and none of its answers break off.
    """
    before = allocated(device)
    peer = TransformersPeer(folder, dtype, torch.device(device))
    held = allocated(device) - before if is_cuda(device) else storage_bytes(held_tensors(peer.model))

    def is_enough(times: Sequence[float]) -> bool:
        return max_seconds is not None and len(times) > MIN_DECODED and times[-1] - times[0] >= max_seconds

    def contender(way: str) -> Contender:
        is_bounded = False

        def answer(prompt_ids: list[int], new_tokens: int) -> Run:
            nonlocal is_bounded
            found = peer.run(way, prompt_ids, new_tokens, is_enough if is_bounded else None)
            is_bounded = way == "eager"
            return found

        def trace(prompt_ids: list[int], new_tokens: int, window: TraceWindow) -> None:
            peer.run(way, prompt_ids, new_tokens, lambda _: not window.token())

        title = "transformers, " + ("static cache, compiled" if way == "compiled" else "eager")
        name, settings = f"transformers_{way}", {"generate": peer.settings(way)}
        return Contender(name, title, answer, trace, settings, peer.weight_bytes, None, held)

    return [contender(way) for way in ways]


def is_cuda(device: str) -> bool:
    return device.startswith("cuda")


def allocated(device: str) -> int:
    """Bytes that PyTorch's allocator has given out on a GPU; 0 on a CPU, where it does not count."""
    return torch.cuda.memory_allocated(device) if is_cuda(device) else 0


def answer_and_peak(contender: Contender, prompt_ids: list[int], new_tokens: int, device: str) -> Run:
    """One answer, with the contender's ``peak`` raised to the most that it held meanwhile."""
    if not is_cuda(device):
        return contender.answer(prompt_ids, new_tokens)
    before = allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    answer = contender.answer(prompt_ids, new_tokens)
    peak = contender.resident + torch.cuda.max_memory_allocated(device) - before
    contender.peak = max(contender.peak or 0, peak)
    return answer


def storage_bytes(tensors: Iterator[Any]) -> int:
    """Bytes of the memory behind tensors, each piece once however many tensors look at it."""
    pieces = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(pieces.values())


def held_tensors(root: Any) -> Iterator[torch.Tensor]:
    """Every tensor that can be reached from an object through attributes, lists, tuples and dictionaries."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, str | bytes | int | float | type):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list | tuple | set | frozenset):
            waiting += value
        elif hasattr(value, "__dict__"):
            waiting += vars(value).values()

"""Streams one answer to the terminal and measures it. Introduced in phase 2.

Invariant: text is written as soon as the engine yields it. Times run from the request to each token, so they measure
how long a user waits.
"""

import math
import sys
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from shared.lessons import Lesson
from shared.terminal import printable, stderr_console

if TYPE_CHECKING:
    from shared.sampling.params import SamplingParams


class TerminalAnswer:
    """Streams one answer to standard output; keeps its text and the seconds from the request to each token."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.num_prompt_tokens = len(prompt_ids)
        self.prompt_ids = list(prompt_ids)
        self.text = ""
        self.token_times: list[float] = []
        self.finish_reason: str | None = None
        self.device = ""

    def stream(self, engine: Any, params: "SamplingParams") -> None:
        """Generate and write until the answer ends; after an interruption the text so far is kept."""
        from shared.loading.placement import device_name

        self.device = device_name(engine.model.device)
        show = printable if sys.stdout.isatty() else str
        started = time.perf_counter()
        for output in engine.generate(self.prompt_ids, params):
            self.token_times.append(time.perf_counter() - started)
            self.text += output.text
            sys.stdout.write(show(output.text))
            sys.stdout.flush()
            self.finish_reason = output.finish_reason
        sys.stdout.write("\n")
        sys.stdout.flush()

    @property
    def num_tokens(self) -> int:
        return len(self.token_times)

    @property
    def decode_speed(self) -> float | None:
        """Tokens per second after the first token; None for a single token."""
        if self.num_tokens < 2:
            return None
        return (self.num_tokens - 1) / (self.token_times[-1] - self.token_times[0])

    def summary(self) -> str:
        """The line of speeds below an answer, with the device that computed it."""
        speed = self.decode_speed
        rate = "no decode (one token)" if speed is None else f"decode {speed:.1f} tokens/s"
        count = f"{self.num_tokens} token{'s' * (self.num_tokens != 1)} on {self.device}"
        return f"first token {self.token_times[0]:.3f} s · {rate} · {count} · finish: {self.finish_reason}"


def show_summary(answer: TerminalAnswer) -> None:
    """Write the line of speeds to standard error."""
    stderr_console().print(answer.summary(), style="dim", soft_wrap=True, markup=False)


def show_stats(
    lesson: Lesson,
    engine: Any,
    answer: TerminalAnswer,
    seed: int | None,
    load_seconds: float,
    profile: Mapping[str, float | int] = MappingProxyType({}),
) -> None:
    """Write a table of the run to standard error; an engine adds its own rows through ``stats()``, followed by the
    profile."""
    from rich.table import Table

    parameters = list(engine.model.parameters())
    # Matrices of 8 or 4 bits (phase 10) are not parameters.
    quantized = [part.weight for part in engine.model.modules() if hasattr(getattr(part, "weight", None), "num_bytes")]
    kept = " beside the packed" if engine.config.pack_weights else ""
    rows = {
        "phase": f"{lesson.number} {lesson.title}",
        "model": engine.config.model,
        f"parameters{kept}": sum(math.prod(weight.shape) for weight in (*parameters, *quantized)),
        f"bytes of weights{kept}": sum(parameter.nbytes for parameter in parameters)
        + sum(weight.num_bytes for weight in quantized),
        "dtype, device": f"{str(engine.model.dtype).removeprefix('torch.')}, {engine.model.device}",
        "load, seconds": load_seconds,
        "prompt tokens": answer.num_prompt_tokens,
        "new tokens": answer.num_tokens,
        "tokens computed": engine.stats()["tokens computed"],
        "seed": "none needed: greedy" if seed is None else str(seed),
    }
    rows |= {**engine.stats(), **profile}
    table = Table("what", "value", title="run", title_justify="left")
    for name, value in rows.items():
        table.add_row(
            name, value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:.3f}"
        )
    stderr_console().print(table)

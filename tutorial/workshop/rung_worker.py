"""One side of a learner's ladder: loads and times one phase after the other, in a process of its own.

Started by `tutorial.workshop.chart` as ``python -m tutorial.workshop.rung_worker`` with the settings as JSON. Each line
on standard input is an order, ``[method of Side, arguments...]`` as JSON; the answer is a line of JSON on what was
standard output. What the learner's code prints goes to standard error. Invariant: at most one engine is loaded.
"""

import json
import os
import sys
from functools import partial
from types import FrameType
from typing import Any

from shared.errors import InferError
from tutorial.workshop.exercises import ROOT, exercises, order
from tutorial.workshop.overlay import install, is_enabled, workspace_folder

WARM_UP_SECONDS = 0.5
MIN_DECODED = 4
"""Tokens of one request's answer that are timed even where they take longer than a trial may."""


class Side:
    """Measures with the modules that this process imports: the learner's, or the reference's."""

    def __init__(self, model: str, prompt_tokens: int, new_tokens: int, max_seconds: float) -> None:
        from benchmarks.setup import Setup

        self.setup = Setup(model)
        self.prompt_tokens, self.new_tokens, self.max_seconds = prompt_tokens, new_tokens, max_seconds
        self.engine: Any = None  # the phase's, and its queue
        self.queue: Any = None
        folder = workspace_folder() if is_enabled() else ROOT
        self.functions = {(str(folder / each.path), each.target): each.number for each in exercises()}

    def begin(self) -> dict[str, Any]:
        """What is measured, and the phases' numbers and titles."""
        import torch

        from benchmarks.contenders import generating_lessons
        from benchmarks.ladder import TOGETHER
        from benchmarks.machine import machine_title
        from benchmarks.report import describe_model

        self.setup.check_length(
            max(self.prompt_tokens + self.new_tokens, TOGETHER.longest), "The requests of the chart"
        )
        self.setup.check_memory(1, "close other programs")
        return {
            "model": describe_model(self.setup.model)["name"],
            "machine_title": machine_title("cpu"),
            "dtype": str(self.setup.work.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "together": TOGETHER.describe(),
            "phases": [[lesson.number, lesson.title] for lesson in generating_lessons(None)],
        }

    def load(self, phase: str) -> list[str]:
        """Load a phase's engine and warm it up; the exercises whose functions ran."""
        from benchmarks.ladder import REGION_TOKENS, load_rung
        from shared.lessons import find_lesson
        from shared.sampling.params import SamplingParams

        # Every processor of logits and the search for stop strings.
        sampled = SamplingParams(temperature=0.7, top_k=50, top_p=0.9, seed=0, stop=("\n\n\n",), max_new_tokens=3)

        called: set[str] = set()

        def note(frame: FrameType, event: str, argument: Any) -> None:
            number = self.functions.get((frame.f_code.co_filename, frame.f_code.co_qualname))
            if number is not None:
                called.add(number)

        limit = self.setup.shape.max_position_embeddings
        longest = max(REGION_TOKENS, self.prompt_tokens + self.new_tokens)
        sys.setprofile(note)
        try:
            config = self.setup.config(max_seq_len=min(limit, longest))
            self.engine, self.queue = load_rung(find_lesson(phase), config)
            for _ in self.engine.generate([1] * self.prompt_tokens, sampled):
                pass
            self.trial(-1, WARM_UP_SECONDS)
        finally:
            sys.setprofile(None)
        return sorted(called, key=order)

    def trial(self, number: int, max_seconds: float | None = None) -> dict[str, Any]:
        """Tokens a second with one request and with 16, and the one request's tokens; a number has its own prompts."""
        from benchmarks.ladder import TOGETHER
        from benchmarks.serving.engine_load import drive
        from benchmarks.timing import SyntheticPrompts, answer_with, timed
        from benchmarks.workloads.serving import make_trace

        max_seconds = max_seconds or self.max_seconds
        vocab_size = self.setup.shape.vocab_size
        prompt = SyntheticPrompts(vocab_size, number + 1).draw(self.prompt_tokens)
        alone = timed(partial(answer_with, self.engine), prompt, self.new_tokens, MIN_DECODED, max_seconds)
        trace = make_trace(TOGETHER, vocab_size, number + 1)
        served = drive(self.queue, trace, max_seconds)
        return {
            "one": alone.decode_tokens_per_second,
            "together": served.num_tokens / served.seconds,
            "token_ids": alone.token_ids,
        }

    def drop(self) -> None:
        """Free the engine."""
        from benchmarks.setup import free_memory

        self.engine = self.queue = None
        free_memory()


def main() -> None:
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(**values: Any) -> None:
        channel.write(json.dumps(values) + "\n")
        channel.flush()

    try:
        if is_enabled():
            install()
        side = Side(**json.loads(sys.argv[1]))
        for line in sys.stdin:
            method, *arguments = json.loads(line)
            say(answer=getattr(side, method)(*arguments))
    except InferError as error:
        say(error=str(error))
        sys.exit(1)


if __name__ == "__main__":
    main()

"""The contenders of a speed benchmark, and the turns they take: phases' engines, transformers, vLLM. Introduced in
phase 3.

Invariant: contenders differ only in how they answer. All are loaded before the first is timed; all get the same prompts
and as many new tokens; none sees a prompt twice, so none can profit from what an earlier answer left in its memory.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.generation.step_trace import StepTrace, TraceWindow
from benchmarks.report import rounded
from benchmarks.setup import Setup
from benchmarks.timing import Answer, Run, Steps, SyntheticPrompts, answer_with, rotated, timed
from shared.engine.config import EngineConfig
from shared.errors import ConfigError
from shared.lessons import Lesson, find_lesson, lessons

MIN_DECODED = 8
"""Tokens that an answer has before a bound of seconds may break it off."""
Bound = tuple[int, float | None]
"""As `timed` takes it: least tokens, most seconds."""


@dataclass
class Contender:
    """One that answers.

    Args:
        settings: for the report.
        num_warm_ups: answers before the first trial.
    """

    title: str
    answer: Answer
    settings: EngineConfig | dict[str, Any]
    num_warm_ups: int = 1


class Turns:
    """Contenders answer the same prompts one after the other, each first as often as the others.

    ``max_seconds`` of decoding break an engine's answer off, once it has `MIN_DECODED` tokens; not transformers'.
    """

    def __init__(self, setup: Setup, steps: Steps, max_seconds: float | None = None) -> None:
        self.steps, self.num_rounds = steps, 0
        self.bound: Bound = MIN_DECODED, max_seconds
        self.prompts = SyntheticPrompts(setup.shape.vocab_size, setup.seed)
        self.contenders: dict[str, Contender] = {}

    def load(self, name: str, load: Callable[[], Mapping[str, Contender]]) -> None:
        """Load one contender, or several that share their weights."""
        with self.steps.step(f"{label(name)}: load"):
            self.contenders |= load()

    def warm_up(self, prompt_tokens: int, new_tokens: int) -> None:
        for name, contender in self.contenders.items():
            with self.steps.step(f"{label(name)}: warm up"):
                for _ in range(contender.num_warm_ups):
                    timed(contender.answer, self.prompts.draw(prompt_tokens), new_tokens)

    def round(self, what: str, prompt_tokens: int, new_tokens: int, bound: Bound | None = None) -> dict[str, Run]:
        """Each contender's answer to one new prompt, by name; ``bound``: another least number of tokens and time."""
        prompt = self.prompts.draw(prompt_tokens)
        found: dict[str, Run] = {}
        for name in rotated(tuple(self.contenders), self.num_rounds):
            with self.steps.step(f"{label(name)}: {what}"):
                found[name] = timed(self.contenders[name].answer, prompt, new_tokens, *(bound or self.bound))
        self.num_rounds += 1
        return found

    def trials(self, number: int, prompt_tokens: int, new_tokens: int) -> dict[str, list[Run]]:
        """The answers of so many rounds, by contender."""
        rounds = [self.round(f"trial {n + 1} of {number}", prompt_tokens, new_tokens) for n in range(number)]
        return {name: [answers[name] for answers in rounds] for name in self.contenders}

    def trace(self, name: str, window: TraceWindow, prompt_tokens: int, new_tokens: int) -> StepTrace:
        """What one contender does in a window of one more answer."""
        with self.steps.step(f"{label(name)}: profile"):
            return window.trace(self.contenders[name].answer, self.prompts.draw(prompt_tokens), new_tokens)


def label(name: str) -> str:
    """``phase 03`` of a phase's number; a peer's name as it is."""
    return f"phase {name}" if is_ours(name) else name


def is_ours(name: str) -> bool:
    """Whether a contender is a phase, by its number."""
    return name[0].isdigit()


def speeds(runs: Sequence[Run]) -> dict[str, Any]:
    """What the answers of one contender tell, for a report."""
    trials = [run.decode_tokens_per_second for run in runs]
    return {
        "time_to_first_token_ms": rounded(1e3 * statistics.median(run.times[0] for run in runs)),
        "decode_tokens_per_second": rounded(statistics.median(trials)),
        "decode_tokens_per_second_trials": [rounded(speed) for speed in trials],
        "tokens_computed": statistics.median_low(run.tokens_computed for run in runs),
    }


def generating_lessons(numbers: Sequence[str] | None) -> list[Lesson]:
    """The phases asked for, in their own order, each once, or all that generate; ConfigError for any other."""
    able = {lesson.number: lesson for lesson in lessons() if lesson.generates}
    asked = set(able) if numbers is None else {find_lesson(number).number for number in numbers}
    if not asked:
        raise ConfigError(f"No phase was named; name at least one of {', '.join(able)}.")
    if wrong := sorted(asked - set(able)):
        raise ConfigError(f"Phase {wrong[0]} generates no text; phases that do: {', '.join(able)}.")
    return [lesson for number, lesson in able.items() if number in asked]


def load_engine(lesson: Lesson, config: EngineConfig) -> dict[str, Contender]:
    """A phase's engine, for one request at a time."""
    engine = lesson.engine_alone(config)
    title = f"phase {lesson.number}: {lesson.title}"
    return {lesson.number: Contender(title, partial(answer_with, engine), engine.config)}

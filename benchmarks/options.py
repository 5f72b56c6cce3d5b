"""Gains that phases offer as options: 8 and 4 bits, drafts, grammars, compression. Introduced in phase 12.

With default settings phases 9.2 and 10 to 12 behave like phase 9, so their rungs of the ladder show no gain. Here an
engine of the phase answers with and without the option, interleaved, one engine in memory at a time. Medians count. An
option that the model's shape rules out has no row. Invariant: the options of a phase are measured on the same prompts.
"""

import json
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.report import ratio, rounded
from benchmarks.roofline import weight_bytes
from benchmarks.setup import Setup, free_memory
from benchmarks.speculation import TASKS
from benchmarks.timing import Steps, rotated
from shared.errors import ConfigError, ModelFolderError
from shared.grammar.grammar import Grammar
from shared.lessons import Lesson
from shared.sampling.params import SamplingParams
from shared.text.chat import ChatMessage, choose_template, encode_chat

MAX_SEQ_LEN, WARM_UP_TOKENS = 512, 3
PERSON = Grammar.json_schema(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 40}, "born": {"type": "integer"}},
        "required": ["name", "born"],
        "additionalProperties": False,
    }
)
QUESTIONS = tuple(
    f'Who {what}? Answer as JSON, with the keys "name", a string, and "born", a year.'
    for what in ("wrote the first program", "discovered radium", "painted Guernica")
)
"""Each asks for a person, whom a program wants to read."""


@dataclass(frozen=True)
class Option:
    """One row: settings of an engine, and its workload; ``is_read``: the answer is read by a program, which needs a
    `PERSON`."""

    phase: str
    title: str
    questions: Sequence[str]
    settings: dict[str, Any] = field(default_factory=dict)
    grammar: Grammar | None = None
    is_read: bool = False
    max_tokens: int = 48


EDIT, STORY = (TASKS["edit"],), (TASKS["story"],)
LOOKUP = {"use_speculative_decoding": True, "drafter": "ngram"}
FORGETS = {"compress_method": "snapkv", "layer_budget": 40, "layer_upper_budget": 48, "steps_between_compressions": 16}
OPTIONS = (
    Option("09.2", "a long answer", STORY, max_tokens=160),
    Option("09.2", "a long answer, compressed", STORY, FORGETS, max_tokens=160),
    Option("10", "weights as they are", STORY, max_tokens=16),
    Option("10", "8 bits", STORY, {"quantization": "int8"}, max_tokens=16),
    Option("10", "4 bits", STORY, {"quantization": "int4"}, max_tokens=16),
    Option("11", "an edit, plain", EDIT),
    Option("11", "an edit, drafts looked up", EDIT, LOOKUP),
    Option("12", "JSON asked for", QUESTIONS, is_read=True),
    Option("12", "JSON by its schema", QUESTIONS, grammar=PERSON, is_read=True),
)


def options_of(lessons: Sequence[Lesson]) -> list[Option]:
    """The options of these phases."""
    return [option for option in OPTIONS if option.phase in {lesson.number for lesson in lessons}]


def measure_options(setup: Setup, lessons: Sequence[Lesson], trials: int, steps: Steps) -> dict[str, list[Any]]:
    """The rows of each phase that has options, with the speed over that of its first row."""
    found: dict[str, list[Any]] = {}
    for lesson in lessons:
        options = {option.title: option for option in options_of([lesson])}
        tries: dict[str, list[dict[str, float]]] = {title: [] for title in options}
        for trial in range(trials if options else 0):
            for title in rotated(tuple(options), trial):
                with steps.step(f"phase {lesson.number}, {title}, trial {trial + 1} of {trials}"):
                    with suppress(ConfigError):  # such as 4-bit groups that do not divide a row
                        tries[title].append(_measured(setup, lesson, options[title]))
                    free_memory()
        rows: list[dict[str, Any]] = [
            {"title": title} | {key: rounded(statistics.median(each[key] for each in values)) for key in values[0]}
            for title, values in tries.items()
            if values
        ]
        if rows:
            speeds = [row["tokens_per_second"] for row in rows]
            pairs = zip(rows, speeds, strict=True)
            found[lesson.number] = [row | {"speedup": ratio(speed, speeds[0])} for row, speed in pairs]
    return found


def _measured(setup: Setup, lesson: Lesson, option: Option) -> dict[str, float]:
    """Tokens per second after the first of each answer, tokens per forward pass, maximum KV blocks held during the
    first half of all tokens and overall, bytes of weights, valid answers.
    """
    limit = min(MAX_SEQ_LEN, setup.shape.max_position_embeddings)
    engine = lesson.engine_alone(setup.config(max_seq_len=limit, **option.settings))
    arguments: dict[str, Any] = {"structured_output": option.grammar, "ignore_eos": not option.is_read}
    params = SamplingParams(temperature=0.0, max_new_tokens=option.max_tokens, **arguments)
    prompts = [_prompt(engine, text)[-(limit - option.max_tokens) :] for text in option.questions]
    for _ in engine.generate(prompts[0], replace(params, max_new_tokens=WARM_UP_TOKENS)):
        pass
    seconds, num_tokens, num_valid, held = 0.0, 0, 0, [0]
    before = engine.stats()["forward passes"]
    for prompt in prompts:
        started, text = 0.0, ""
        for output in engine.generate(prompt, params):
            num_tokens += 1 if started else 0
            started = started or time.perf_counter()
            text += output.text
            held.append(sum(map(len, engine.pool.holdings()[1].values())))
        seconds += time.perf_counter() - started
        num_valid += is_person(text)
    num_forwards = engine.stats()["forward passes"] - before
    found = {
        "tokens_per_second": num_tokens / seconds,
        "tokens_per_forward": (num_tokens + len(prompts)) / num_forwards,
        "half_kv_blocks": float(max(held[: len(held) // 2 + 1])),
        "kv_blocks": float(max(held)),
        "weight_bytes": float(weight_bytes(engine.model)),
    }
    return found | ({"valid_share": num_valid / len(prompts)} if option.is_read else {})


def is_person(text: str) -> bool:
    """Whether a program could read the answer: JSON with the two keys, and values of their types."""
    try:
        found = json.loads(text)
    except ValueError:
        return False
    is_object = isinstance(found, dict) and found.keys() == {"name", "born"}
    return is_object and isinstance(found["name"], str) and type(found["born"]) is int


def _prompt(engine: Any, text: str) -> list[int]:
    """The ids of a question; without a chat format, those of its plain text."""
    try:
        template = choose_template(engine.model.config.family, engine.tokenizer)
    except ModelFolderError:
        ids: list[int] = engine.tokenizer.encode(text)
        return ids
    return encode_chat(engine.tokenizer, [ChatMessage("user", text)], template=template)

"""The contenders of a speed benchmark, and their order: the phases' engines, and peers as their users get them.

Introduced in phase 3; peers in phase 3.1. ``transformers_eager`` is a plain ``generate``; ``transformers_compiled`` has
the static cache, for which ``generate`` compiles the decode step, on a GPU; ``compile`` is our own engine, with
``torch.compile`` instead of our kernels. Invariants: all contenders are loaded before the first is timed and get the
same prompts, without repeats; no part of a peer is replaced or tuned.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.report import rounded
from benchmarks.serving import vllm_peer
from benchmarks.setup import Setup, freeze_memory
from benchmarks.step_trace import StepTrace, TraceWindow
from benchmarks.timing import (
    Answer,
    OnToken,
    Run,
    Steps,
    SyntheticPrompts,
    answer_with,
    rotated,
    timed,
    torch_threads,
)
from shared.engine.config import EngineConfig
from shared.errors import ConfigError
from shared.lessons import Lesson, find_lesson, lessons
from shared.loading.cpu_threads import most_threads
from shared.parity.reference import load_reference

MIN_DECODED = 8  # minimum tokens of an answer before a time limit may cut it short
PEERS = {
    "transformers_eager": "transformers, eager",
    "transformers_compiled": "transformers, static cache, compiled",
    "vllm": "vLLM",
    "compile": "phase 11.1, compiled by PyTorch in place of our kernels",
}


@dataclass
class Contender:
    """One that answers; ``settings`` are for the report, and ``num_warm_ups`` answers come before the first trial."""

    title: str
    answer: Answer
    settings: EngineConfig | dict[str, Any]
    num_warm_ups: int = 1
    ready_seconds: float = 0.0  # time to load, compile, record graphs, and warm up


class Turns:
    """Contenders that answer the same prompts one after the other, each going first equally often. After
    ``max_seconds`` of decoding, an engine's answer is cut short if it has `MIN_DECODED` tokens; transformers' answers
    are not.
    """

    def __init__(self, setup: Setup, steps: Steps, max_seconds: float | None = None) -> None:
        self.steps, self.num_rounds, self.max_seconds = steps, 0, max_seconds
        self.prompts = SyntheticPrompts(setup.shape.vocab_size, setup.seed)
        self.contenders: dict[str, Contender] = {}

    def load(self, name: str, load: Callable[[], Mapping[str, Contender]]) -> None:
        """Load one contender, or several that share their weights."""
        started = time.perf_counter()
        with self.steps.step(f"{label(name)}: load"):
            loaded = load()
        for contender in loaded.values():
            contender.ready_seconds = time.perf_counter() - started
        self.contenders |= loaded

    def warm_up(self, prompt_tokens: int, new_tokens: int) -> None:
        for name, contender in self.contenders.items():
            started = time.perf_counter()
            with self.steps.step(f"{label(name)}: warm up"):
                for _ in range(contender.num_warm_ups):
                    timed(contender.answer, self.prompts.draw(prompt_tokens), new_tokens)
            contender.ready_seconds += time.perf_counter() - started
        freeze_memory()

    def round(self, what: str, prompt_tokens: int, new_tokens: int) -> dict[str, Run]:
        """Each contender's answer to one new prompt, by name."""
        prompt = self.prompts.draw(prompt_tokens)
        found: dict[str, Run] = {}
        for name in rotated(tuple(self.contenders), self.num_rounds):
            with self.steps.step(f"{label(name)}: {what}"):
                found[name] = timed(self.contenders[name].answer, prompt, new_tokens, MIN_DECODED, self.max_seconds)
        self.num_rounds += 1
        return found

    def trials(self, number: int, prompt_tokens: int, new_tokens: int) -> dict[str, list[Run]]:
        """The answers of this many rounds, by contender."""
        rounds = [self.round(f"trial {n + 1} of {number}", prompt_tokens, new_tokens) for n in range(number)]
        return {name: [answers[name] for answers in rounds] for name in self.contenders}

    def trace(self, name: str, window: TraceWindow, prompt_tokens: int, new_tokens: int) -> StepTrace:
        """One contender's work within a window of one more answer."""
        with self.steps.step(f"{label(name)}: profile"):
            return window.trace(self.contenders[name].answer, self.prompts.draw(prompt_tokens), new_tokens)


def label(name: str) -> str:
    """``phase 03`` for a phase's number; a peer's name unchanged."""
    return f"phase {name}" if is_ours(name) else name


def is_ours(name: str) -> bool:
    """Whether a contender is a phase, by its number."""
    return name[0].isdigit()


def speeds(runs: Sequence[Run]) -> dict[str, Any]:
    """The figures of one contender's answers, for a report."""
    trials = [run.decode_tokens_per_second for run in runs]
    return {
        "time_to_first_token_ms": rounded(1e3 * statistics.median(run.times[0] for run in runs)),
        "decode_tokens_per_second": rounded(statistics.median(trials)),
        "decode_tokens_per_second_trials": [rounded(speed) for speed in trials],
        "tokens_computed": statistics.median_low(run.tokens_computed for run in runs),
    }


def generating_lessons(numbers: Sequence[str] | None) -> list[Lesson]:
    """The requested phases, in order and without duplicates, or all that generate; ConfigError for any other."""
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


def choose_peers(asked: Sequence[str] | None, is_gpu: bool) -> list[str]:
    """The requested peers, or all that can run here; raises ConfigError for one that cannot."""
    able = list(PEERS) if is_gpu else ["transformers_eager", *({"compile"} & set(asked or ()))]
    if not vllm_peer.is_installed():
        able = [name for name in able if name != "vllm"]
    for name in asked or ():
        if name not in PEERS:
            raise ConfigError(f"There is no peer {name!r}; there are {', '.join(PEERS)}.")
        if name not in able:
            what = "a GPU and an installed vLLM" if name == "vllm" else "a GPU (--device cuda)"
            raise ConfigError(f"The peer {name} needs {what}; peers that can run here: {', '.join(able)}.")
    return able if asked is None else [name for name in able if name in asked]


def load_peers(program: str, names: Sequence[str], setup: Setup, max_seq_len: int) -> dict[str, Contender]:
    """The peers of one program, ``transformers``, ``vllm`` or ``compile``, on one copy of the weights."""
    if program == "vllm":  # in this process, for one request at a time
        engine = vllm_peer.VllmEngine(setup.folder, setup.work.dtype, max_seq_len)
        return {program: Contender(PEERS[program], partial(answer_with, engine), engine.settings)}
    if program == "compile":
        config = setup.config(max_seq_len=max_seq_len, execution="compile")
        (contender,) = load_engine(find_lesson("11.1"), config).values()
        contender.title = PEERS[program]
        return {program: contender}
    return load_transformers([name for name in names if name.startswith(program)], setup)


def load_transformers(names: Sequence[str], setup: Setup) -> dict[str, Contender]:
    """transformers in one or both modes, with its default attention. Of the compiled one's three warm-ups, one compiles
    and two record the CUDA graph and replay it.
    """
    from transformers import CompileConfig, GenerationConfig

    model = load_reference(setup.folder, setup.work.dtype).to(setup.target)
    model.generation_config = GenerationConfig()  # the folder's own config would bring back its end ids
    found, plain = {}, {"do_sample": False, "attention": "sdpa"}
    for name in names:
        ways: dict[str, Any] = {}
        if name == "transformers_compiled":
            ways = {"cache_implementation": "static", "compile_config": CompileConfig()}
        settings = plain | ways | ({"compile_config": CompileConfig().to_dict()} if ways else {})
        answer = partial(generate_with, model, ways)
        found[name] = Contender(PEERS[name], answer, {"generate": settings}, num_warm_ups=3 if ways else 1)
    return found


class TokenStreamer:
    """Hands each token that ``generate`` makes to ``on_token``; cannot cut an answer short."""

    def __init__(self, on_token: OnToken) -> None:
        self.on_token, self.num_tokens = on_token, -1  # the first call passes the prompt

    def put(self, value: torch.Tensor) -> None:
        self.num_tokens += 1
        if self.num_tokens:
            self.on_token(int(value))

    def end(self) -> None:
        pass


def generate_with(model: Any, ways: dict[str, Any], prompt_ids: list[int], new_tokens: int, on_token: OnToken) -> int:
    """Let transformers answer: an `Answer` once the model and further settings of its GenerationConfig are bound."""
    from transformers import GenerationConfig

    config = GenerationConfig(do_sample=False, max_new_tokens=new_tokens, pad_token_id=0, **ways)
    ids = torch.tensor([prompt_ids], device=model.device)
    streamer = TokenStreamer(on_token)
    with torch_threads(most_threads()):  # not the number that one of our models has chosen for its last forward
        model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=streamer)
    return len(prompt_ids) + streamer.num_tokens - 1

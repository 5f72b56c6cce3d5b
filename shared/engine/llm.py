"""Offline batch inference: a list of prompts in, a list of outputs out, no server. Introduced in phase 4.

    from shared.engine.llm import LLM
    from shared.sampling.params import SamplingParams

    llm = LLM("smollm2-135m", max_batch_size=32)
    answers = llm.generate(["The capital of France is", "2 + 2 ="], SamplingParams(temperature=0.0, max_new_tokens=8))
    print(answers[0].text)

The engine's queue is bounded, so ``generate`` adds prompts as the queue empties; their number is not limited. On a GPU
it begins with those of the first step, and adds the rest while steps run.
Invariants: answers are in the order of the prompts; an invalid prompt is refused before anything is computed; when
``generate`` returns or raises, the engine holds none of its requests.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shared.engine.config import EngineConfig
from shared.engine.output import StepOutput
from shared.engine.prompt import CheckedIds, check_prompt
from shared.engine.request import TokenLogprobs
from shared.errors import ConfigError, RequestError
from shared.lessons import find_lesson, lesson_of
from shared.sampling.params import SamplingParams
from shared.text.stopping import FinishReason

Prompt = str | Sequence[int]


@dataclass
class Answer:
    """The output for one prompt. If ``error`` is set the request failed, and the other fields hold a partial output."""

    prompt_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop: str | None = None  # the stop string that ended it
    logprobs: list[TokenLogprobs] | None = None  # for each token, if the parameters request them
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None  # for each prompt token, None for the first
    error: str | None = None

    def add(self, output: StepOutput) -> None:
        """Append the output of one step."""
        self.text += output.text
        if output.token_id is not None:
            self.token_ids.append(output.token_id)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if output.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs.append(output.logprobs)
        self.finish_reason, self.stop, self.error = output.finish_reason, output.stop, output.error


class LLM:
    """A loaded model and its engine.

    Args:
        model: a model folder, a known name, or a hub name.
        phase: the phase of the engine, such as 05; by default the newest of the main line, or the
            side track of a setting.
        config: the other settings of ``EngineConfig``.

    Raises:
        ConfigError: a setting is invalid, or the phase's engine does not batch.
        ModelFolderError: the model is missing, damaged, unsafe or unsupported.
    """

    def __init__(self, model: str, phase: str | None = None, **config: Any) -> None:
        lesson = lesson_of(config) if phase is None else find_lesson(phase)
        if not hasattr(lesson.engine, "step"):
            raise ConfigError(
                f"Phase {lesson.number} ({lesson.title}) answers one request at a time; choose phase 04 or a later "
                "one, or leave phase out for the newest."
            )
        self.engine = lesson.engine(EngineConfig(model=model, **config))

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[Answer]:
        """Generate an answer for every prompt, given as text or token ids; a single str is a list of one.

        Args:
            params: one for all prompts, or one for each; by default ``SamplingParams()``.
            progress: show a progress bar on standard error.

        Raises:
            RequestError: a prompt (the message says which) or params are invalid, or the number of params differs.
        """
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        each = [params or SamplingParams()] * len(prompts) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(prompts):
            raise RequestError(f"There are {len(prompts)} prompts and {len(each)} params; give one, or one for each.")
        for one in each:
            one.check_token_ids(self.engine.model.config.vocab_size)
        checked = [self._checked(index, prompt) for index, prompt in enumerate(prompts)]
        answers = [Answer(list(ids)) for ids in checked]
        waiting = deque(zip(answers, checked, each, strict=True))
        running: dict[str, Answer] = {}
        try:
            with _bar(len(answers), progress) as show:
                num_complete = num_tokens = 0
                while waiting or self.engine.has_work():  # a step may be in flight when the last answer is complete
                    if waiting:
                        self._feed(waiting, running)
                    for output in self.engine.step():
                        running[output.request_id].add(output)
                        num_tokens += output.token_id is not None
                        if output.finish_reason is not None:
                            del running[output.request_id]
                            num_complete += 1
                    show(num_complete, num_tokens)
        finally:
            for request_id in running:
                self.engine.abort(request_id)
        return answers

    def _checked(self, index: int, prompt: Prompt) -> CheckedIds:
        engine = self.engine
        if not isinstance(prompt, str | Sequence):
            raise RequestError(f"Prompt {index} is {prompt!r}; a prompt is a text or a list of token ids.")
        ids = engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        try:
            return check_prompt(ids, engine.model.config.vocab_size, engine.max_seq_len)
        except RequestError as error:
            raise RequestError(f"Prompt {index}, counted from 0: {error}") from None

    def _feed(self, waiting: deque[tuple[Answer, CheckedIds, SamplingParams]], running: dict[str, Answer]) -> None:
        """Add prompts until the engine's queue is full. If a step runs meanwhile, the tokens of the next are enough."""
        engine, config = self.engine, self.engine.config
        queue, most_waiting = engine.scheduler.waiting, config.max_waiting_requests
        adds_all = not getattr(engine, "overlaps", False) or config.batching_mode == "static"
        most_tokens = math.inf if adds_all else config.max_num_batched_tokens
        num_tokens = sum(request.num_prompt_tokens for request in queue.values())
        while waiting and len(queue) < most_waiting and num_tokens < most_tokens:
            answer, ids, params = waiting.popleft()
            running[engine.add_request(ids, params)] = answer
            num_tokens += len(ids)


@contextmanager
def _bar(total: int, is_shown: bool) -> Iterator[Callable[[int, int], None]]:
    """Yields a function that shows how many answers are complete, and how many tokens there are."""
    if not is_shown:
        yield lambda num_complete, num_tokens: None
        return
    columns = (
        TextColumn("answers"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("answers", total=total, tokens=0)
        yield lambda num_complete, num_tokens: bar.update(task, completed=num_complete, tokens=num_tokens)

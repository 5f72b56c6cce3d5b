"""Texts that a model generates itself, for training and evaluation. Introduced in phase 11.1.

A drafter learns from the model's own distribution, so no data set is needed: the model answers the prompts of
``prompts.json``. The answers to held-out prompts are greedy and are used only for evaluation.

Invariant: a text is a prompt followed by its answer; ``is_answer`` marks the tokens that the model wrote.
"""

import itertools
import json
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shared.engine.llm import LLM
from shared.errors import ConfigError, ModelFolderError
from shared.sampling.params import SamplingParams
from shared.text.chat import ChatMessage
from shared.text.chat_format import chat_format

PROMPTS = Path(__file__).parent / "prompts.json"
TEMPERATURES = (0.7, 0.0, 0.4, 1.0)
"""Temperatures of the answers to a prompt, in turn."""
LONGEST = 512
"""Maximum tokens of a prompt and its answer."""
AT_A_TIME = 1024
"""Number of prompts that are passed to the engine at a time."""


@dataclass(frozen=True)
class Texts:
    """Conversations laid end to end and divided into N rows of S tokens."""

    ids: Tensor  # int64 [N, S]
    is_answer: Tensor  # bool [N, S]

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], length: int) -> "Texts":
        """The rows of ``length`` tokens; a remainder that does not fill a row is dropped. Raises ConfigError if there
        are none."""
        ids, marks = [], []
        for prompt, answer in zip(prompts, answers, strict=True):
            ids += [*prompt, *answer]
            marks += [False] * len(prompt) + [True] * len(answer)
        num_rows = len(ids) // length
        if num_rows == 0:
            raise ConfigError(f"The texts have {len(ids)} tokens and a row has {length}; make rows shorter.")
        end = num_rows * length
        return cls(torch.tensor(ids[:end]).view(-1, length), torch.tensor(marks[:end]).view(-1, length))


def write_texts(
    model: str,
    *,
    num_prompts: int,
    length: int,
    max_new_tokens: int,
    seed: int,
    report: Callable[[str], None] = lambda _: None,
    **config: Any,
) -> tuple[Texts, Texts]:
    """The texts that ``model`` generates for ``num_prompts`` prompts, and for the held-out ones.

    Args:
        length: the number of tokens per row.
        max_new_tokens: the maximum length of an answer.
        seed: determines the choice of prompts, and the answers.
        report: receives a line of progress from time to time.
        config: settings of the writing engine, such as its device and batch size.
    """
    llm = LLM(model, max_seq_len=LONGEST, num_gpu_blocks=config["max_batch_size"] * LONGEST // 16, **config)
    source = json.loads(PROMPTS.read_text(encoding="utf-8"))
    pairs = list(itertools.product(source["requests"], source["topics"]))
    random.Random(seed).shuffle(pairs)
    asked = [request.format(topic=topic) for request, topic in itertools.islice(itertools.cycle(pairs), num_prompts)]
    encode = _encoder(llm.engine)
    texts = []
    for prompts, is_held_out in ((asked, False), (source["held_out"], True)):
        encoded = [encode(prompt) for prompt in prompts]
        params = [
            SamplingParams(
                temperature=0.0 if is_held_out else TEMPERATURES[number // len(pairs) % len(TEMPERATURES)],
                max_new_tokens=max_new_tokens,
                seed=seed + number,
            )
            for number in range(len(prompts))
        ]
        answers: list[list[int]] = []
        while len(answers) < len(encoded):
            part = slice(len(answers), len(answers) + AT_A_TIME)
            answers += [answer.token_ids for answer in llm.generate(encoded[part], params[part], progress=False)]
            report(f"{len(answers)} of {len(encoded)} answers, {sum(map(len, answers))} tokens")
        texts.append(Texts.of(encoded, answers, length))
    return texts[0], texts[1]


def _encoder(engine: Any) -> Callable[[str], list[int]]:
    """Encodes a prompt as the first turn of a conversation, or as plain text for a model without a chat format."""
    with suppress(ModelFolderError):
        chosen = chat_format(engine.tokenizer, engine.model.config.family)
        if chosen.name is not None:
            return lambda prompt: chosen.encode([ChatMessage("user", prompt)])
    encode: Callable[[str], list[int]] = engine.tokenizer.encode
    return encode

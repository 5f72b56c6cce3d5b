"""Greedy tokens beside those of transformers, from ``generate`` and from steps that requests share."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared.engine.record import StepRecord
from shared.sampling.params import SamplingParams
from tests.comparison import assert_equal
from tests.mixed_requests import GREEDY, SENTENCE, serve, tokens
from tests.reference_tokens import ReferenceTokens

Asked = Sequence[tuple[str, int]]
"""Prompts, and how many tokens are asked for after each."""
ASKED: Asked = [("The capital of France is", 32), (SENTENCE, 16), ("x", 8)]
ASKED_OF_DEMO: Asked = [("The capital of France is", 8), ("Once upon a time", 8)]


def assert_generated(engine: Any, reference_tokens: ReferenceTokens, folder: Path, asked: Asked) -> None:
    """``generate`` gives the tokens of transformers with the model in ``folder``."""
    for prompt, num_tokens in asked:
        params = SamplingParams(**GREEDY, max_new_tokens=num_tokens)
        ours = [output.token_id for output in engine.generate(prompt, params)]
        expected = reference_tokens(folder, engine.tokenizer.encode(prompt), num_tokens)
        assert_equal(ours, expected, f"tokens after {prompt!r}", ("token",))


def assert_served(
    engine: Any, reference_tokens: ReferenceTokens, asked: Asked, arrivals: Sequence[int] | None = None
) -> list[StepRecord]:
    """Requests that share steps get the tokens of transformers. Returns the records of the steps."""
    answers, records = serve(engine, [(prompt, GREEDY | {"max_new_tokens": n}) for prompt, n in asked], arrivals)
    for (prompt, num_tokens), answer in zip(asked, answers, strict=True):
        expected = reference_tokens(Path(engine.config.model), engine.tokenizer.encode(prompt), num_tokens)
        assert_equal(tokens(answer), expected, f"tokens after {prompt!r}", ("token",))
    return records

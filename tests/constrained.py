"""Requests with grammars, beside requests without one."""

from typing import Any

from shared.grammar.grammar import Grammar
from tests.mixed_requests import PENALISED, STEM, Requests

NGRAM: dict[str, Any] = {"use_speculative_decoding": True, "drafter": "ngram", "adapt_spec_length": False}
DATE = r"\d{4}-\d{2}-\d{2}"
LIST = r"\[\d(, \d){2,9}\]"
PATTERNS = [DATE, LIST, "(yes|no|perhaps)[.!]?", "(ab|ba){4,}c", r"[äöü ]{3,6}\."]
GRAMMARS = [*map(Grammar.regex, PATTERNS), Grammar.choice(["red", "green", "greenish"])]
ENDED = {"ignore_eos": False, "temperature": 0.0}


def constrained(requests: Requests, **more: Any) -> Requests:
    """The requests, with a grammar each, but for every third."""
    return [
        (
            prompt,
            params if n % 3 == 2 else params | ENDED | {"structured_output": GRAMMARS[n // 2 % len(GRAMMARS)]} | more,
        )
        for n, (prompt, params) in enumerate(requests)
    ]


DRAWN: Requests = [
    (STEM, {"seed": 7, "max_new_tokens": 60, "structured_output": GRAMMARS[0]}),
    (STEM[:20], {"seed": 8, "max_new_tokens": 60, "top_k": 20, "structured_output": GRAMMARS[1]}),
    ("x", PENALISED | {"max_new_tokens": 60, "structured_output": GRAMMARS[5], "logit_bias": {}}),
    (STEM, {"seed": 9, "max_new_tokens": 3, "structured_output": GRAMMARS[1]}),
]

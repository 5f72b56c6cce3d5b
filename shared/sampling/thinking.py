"""Limits on how long a model thinks before it answers: budget forcing. Introduced in phase 11.1.

A model that thinks writes ``<think>``, its thoughts, ``</think>``, and then its answer. Two limits control this
(Muennighoff et al., *s1: Simple test-time scaling*, arXiv 2501.19393):

- before ``min_thinking_tokens`` the end of thinking is replaced by a word that makes the model continue, chosen by the
  request's own noise, and no id ends the output;
- after ``thinking_budget`` tokens, ``</think>`` follows.

Invariant: a row's limits depend only on the request and the tokens before that row; nothing is stored, so rejected
drafts leave no trace.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from shared.errors import RequestError
from shared.sampling.noise import Stream, seed_pattern, uniform
from shared.sampling.params import SamplingParams
from shared.sampling.sampler import SamplingRow
from shared.text.thoughts import CLOSE, MARKS, ends_in_thoughts
from shared.text.tokenizer import Tokenizer

WORDS = ("Wait", "Alternatively")
"""Words that replace the end of thinking; those of several tokens are not used."""


@dataclass(frozen=True)
class ThinkingLimits:
    """The limits of one request; a :data:`shared.engine.request.RowLimit`.

    Attributes:
        open_id, close_id: the tokens around the thoughts.
        is_open: the prompt ends inside the thoughts of its last turn.
        least: ``close_id`` is not sampled before this many thinking tokens.
        most: it is sampled after this many; None: no limit.
        end_ids: not sampled before ``least``.
        replacements: the token that replaces ``close_id``, by the number of thinking tokens before it. Empty if the
            tokenizer has none of ``WORDS``; then ``close_id`` is masked.
    """

    open_id: int
    close_id: int
    is_open: bool
    least: int
    most: int | None
    end_ids: tuple[int, ...] = ()
    replacements: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, params: SamplingParams, prompt_ids: Sequence[int], seed: int, end_ids: Sequence[int], tokenizer: Tokenizer
    ) -> Self | None:
        """The limits that the parameters set; None if they set none.

        Raises RequestError if the tokenizer has no tokens around thoughts.
        """
        if not params.limits_thinking:
            return None
        open_id, close_id = map(tokenizer.token_id, MARKS)
        if open_id is None or close_id is None:
            field = "thinking_budget" if params.thinking_budget is not None else "min_thinking_tokens"
            value = getattr(params, field)
            raise RequestError(
                f"{field} is {value}; it must be left out: this model does not think, its tokenizer has no {CLOSE}."
            )
        words = [ids[0] for word in WORDS if len(ids := tokenizer.encode(word, add_special_tokens=False)) == 1]
        least = min(params.min_thinking_tokens, params.max_new_tokens)
        is_open = ends_in_thoughts(prompt_ids, tokenizer)
        replacements = chosen(words, seed, 0 if is_open else 1, least)
        return cls(open_id, close_id, is_open, least, params.thinking_budget, tuple(end_ids), replacements)

    def __call__(self, row: SamplingRow) -> SamplingRow:
        """The row with the limits applied; ``row.output_ids`` includes its drafts."""
        begin = 0 if self.is_open else 1  # the index of the first thinking token
        number = row.index - begin  # of the thinking tokens so far
        if number < 0:  # thinking begins here if a minimum number of tokens is set
            return row._replace(masked_ids=(), redirect=(self.open_id, None)) if self.least else row
        if not self.is_open and row.output_ids[0] != self.open_id:  # this answer has no thoughts
            return row
        if number < self.least:
            if not self.replacements:
                return row._replace(masked_ids=(*self.end_ids, self.close_id))
            return row._replace(masked_ids=self.end_ids, redirect=(self.replacements[number], self.close_id))
        if number == self.most and self.close_id not in row.output_ids:
            return row._replace(masked_ids=(), redirect=(self.close_id, None))
        return row


def chosen(words: Sequence[int], seed: int, first: int, count: int) -> tuple[int, ...]:
    """One of the words for each of ``count`` indices from ``first`` on, chosen by a request's noise; empty without
    words.

    The noise is that of :mod:`shared.sampling.noise`, so neither a preemption nor a guess changes the choice.
    """
    if not words or count == 0:
        return ()
    seeds = torch.full((count,), seed_pattern(seed))
    noise = uniform(seeds, torch.arange(first, first + count), Stream.REPLACEMENT, len(words))
    return tuple(words[number] for number in noise.argmax(-1).tolist())

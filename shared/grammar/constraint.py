"""The requests of an engine whose outputs have a grammar: where each stands, and what it may draw.

Before a step samples, all earlier tokens are known on the host. So the state of a request follows its outputs, and its
rows get the masks of their states: row j that behind the first j drafts. Behind a draft that the grammar refuses no row
matters, because the draft cannot be drawn, and acceptance ends there. Introduced in phase 12.

A state is a function of the outputs alone. So preemption needs nothing here, a rejected draft leaves nothing, and what
is known of a request goes when the request does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from shared.engine.request import Request
from shared.errors import RequestError
from shared.grammar.automaton import Configuration
from shared.grammar.cache import GrammarCache
from shared.grammar.fsm import TokenFSM
from shared.grammar.grammar import Grammar
from shared.grammar.limits import Limits
from shared.grammar.vocabulary import GrammarVocabulary
from shared.sampling.params import SamplingParams
from shared.sampling.sampler import SamplingRow
from shared.scheduling.schedule import Schedule


@dataclass
class Constraint:
    """A request's grammar, and the state behind its first ``num_tokens`` outputs; None behind the end."""

    fsm: TokenFSM
    state: Configuration | None
    num_tokens: int = 0

    def follow(self, output_ids: Sequence[int]) -> None:
        """Go to the state behind all outputs."""
        for token_id in output_ids[self.num_tokens :]:
            self.state = self.state and self.fsm.next_state(self.state, token_id)
        self.num_tokens = len(output_ids)


class Constraints:
    """Compiles grammars for one vocabulary, and masks the rows of the requests that have one.

    Args:
        make_vocabulary: called when the first grammar comes.
    """

    def __init__(self, make_vocabulary: Callable[[], GrammarVocabulary], limits: Limits | None = None) -> None:
        self.make_vocabulary, self.limits = make_vocabulary, limits or Limits()
        self.vocabulary: GrammarVocabulary | None = None
        self.grammars: GrammarCache[TokenFSM] = GrammarCache(
            self._compile, lambda fsm: fsm.automaton.num_bytes + fsm.masks.cache_bytes
        )
        self.requests: WeakKeyDictionary[Request, Constraint] = WeakKeyDictionary()
        self.num_masks = 0

    def check(self, params: SamplingParams) -> None:
        """Compile a request's grammar, unless it is known. Raises GrammarError, RequestError if it could not end."""
        grammar = _grammar(params)
        if grammar is not None and not self.grammars.get(grammar).vocabulary.end_ids:
            raise RequestError("This model has no end-of-sequence token, so an output with a grammar could not end.")

    def masked(self, schedule: Schedule, rows: Sequence[SamplingRow]) -> Sequence[SamplingRow]:
        """The sampling rows of a schedule, with masks where requests have a grammar."""
        if all(request.params.structured_output is None for request in schedule.requests):
            return rows
        result, first = list(rows), 0
        for request, _, _, num_drafts, num_rows, _ in schedule:
            grammar = _grammar(request.params)
            if grammar is not None and num_rows:
                constraint = self._constraint(request, grammar)
                constraint.follow(request.output_ids)
                self._mask(result, first, constraint, [*request.draft_ids[:num_drafts], None][:num_rows])
            first += num_rows
        return result

    def _mask(
        self, rows: list[SamplingRow], first: int, constraint: Constraint, draft_ids: Sequence[int | None]
    ) -> None:
        """Mask the rows from ``first`` on, each behind the drafts before it."""
        fsm, state = constraint.fsm, constraint.state
        for number, draft_id in enumerate(draft_ids, first):
            if state is None:
                return
            allowed = fsm.mask(state)
            rows[number] = rows[number]._replace(allowed=allowed, masked_ids=_masked(rows[number].masked_ids, allowed))
            self.num_masks += 1
            state = None if draft_id is None else fsm.next_state(state, draft_id)

    def _constraint(self, request: Request, grammar: Grammar) -> Constraint:
        found = self.requests.get(request)
        if found is None:
            fsm = self.grammars.get(grammar)
            found = self.requests[request] = Constraint(fsm, fsm.initial_state)
        return found

    def _compile(self, grammar: Grammar) -> TokenFSM:
        if self.vocabulary is None:
            self.vocabulary = self.make_vocabulary()
        automaton = grammar.compiled(self.vocabulary.usable_bytes, self.limits).automaton
        assert automaton is not None
        return TokenFSM(automaton, self.vocabulary)


def _grammar(params: SamplingParams) -> Grammar | None:
    grammar = params.structured_output
    assert grammar is None or isinstance(grammar, Grammar)
    return grammar


def _masked(masked_ids: Sequence[int], allowed: NDArray[np.bool_]) -> Sequence[int]:
    """The ids that ``min_tokens`` forbids, or none if the grammar allows no other: then the output is at its end."""
    if not masked_ids:
        return masked_ids
    rest = allowed.copy()
    rest[list(masked_ids)] = False
    return masked_ids if rest.any() else ()

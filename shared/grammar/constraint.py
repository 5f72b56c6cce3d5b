"""The requests of an engine whose outputs have a grammar: the state of each, and the tokens that it allows.

On a GPU the sampling device computes the masks (:mod:`shared.engine.sampling.grammar_rows`). On a CPU, and in a few
cases on a GPU, they are computed here. Before a step samples, the host knows all earlier tokens, so it advances each
request's state by its outputs; row j gets the mask after the first j drafts. Rows after a draft that the grammar
refuses do not matter: that draft cannot be sampled, so acceptance ends there. Introduced in phase 12.

A state is a function of the outputs alone. So preemption needs no special case, a rejected draft leaves no trace, and
the state is freed with its request.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import numpy as np
from numpy.typing import NDArray

from shared.errors import RequestError
from shared.grammar.automata.automaton import Configuration
from shared.grammar.cache import GrammarCache
from shared.grammar.grammar import Grammar
from shared.grammar.limits import Limits
from shared.grammar.tokens.fsm import FSMCompiler, TokenFSM
from shared.grammar.tokens.pool import GrammarPool
from shared.grammar.tokens.vocabulary import GrammarVocabulary
from shared.sampling.params import SamplingParams
from shared.sampling.sampler import SamplingRow
from shared.scheduling.schedule import Schedule
from shared.text.tokenizer import Tokenizer


@dataclass
class Constraint:
    """A request's grammar, and the state after its first ``num_tokens`` outputs; only :meth:`after` advances it.

    ``base`` is the offset of its tables in the device's pool, from the first sampling on; None: they are not in the
    pool.
    """

    grammar: Grammar
    fsm: TokenFSM
    state: Configuration | None
    num_tokens: int = 0
    has_sampled: bool = False
    base: int | None = None

    def after(self, output_ids: Sequence[int]) -> Configuration | None:
        """The state after all outputs; None after the end. Computed on request: a device that computes the masks
        follows the outputs itself.
        """
        for token_id in output_ids[self.num_tokens :]:
            self.state = self.state and self.fsm.next_state(self.state, token_id)
        self.num_tokens = len(output_ids)
        return self.state


class Constraints:
    """Compiles grammars for one vocabulary, and masks the rows of the requests that have one.

    ``make_vocabulary`` is called by ``prepare``, or when the first grammar arrives. ``pool`` holds the grammars' tables
    on the sampling device; None: masks are computed here.
    """

    def __init__(
        self,
        make_vocabulary: Callable[[], GrammarVocabulary],
        limits: Limits | None = None,
        pool: GrammarPool | None = None,
    ) -> None:
        self.make_vocabulary, self.limits = make_vocabulary, limits or Limits()
        self.pool = pool
        self.vocabulary: GrammarVocabulary | None = None
        self.grammars: GrammarCache[TokenFSM] = GrammarCache(
            self._compile, lambda fsm: fsm.automaton.num_bytes + fsm.masks.cache_bytes
        )
        self.num_masks = 0
        self.steady: tuple[list[int], int] = (
            [],
            0,
        )  # requests whose masks the device computed in a step, and their number

    @classmethod
    def with_tokenizer(cls, tokenizer: Tokenizer, vocab_size: int, pool: GrammarPool | None) -> Self:
        """Args: vocab_size: the model's number of logits; ``pool`` as above."""
        return cls(partial(GrammarVocabulary.of, tokenizer, vocab_size), pool=pool)

    def prepare(self) -> GrammarVocabulary:
        """The vocabulary, made once; takes about 0.3 s for 128,000 tokens."""
        if self.vocabulary is None:
            self.vocabulary = self.make_vocabulary()
        return self.vocabulary

    def stats(self) -> dict[str, int]:
        """Counters for ``infer generate --stats``."""
        return {"grammars compiled": self.grammars.num_compiled, "masks applied": self.num_masks}

    def of(self, params: SamplingParams) -> Constraint | None:
        """The state of an output before its first token; None without a grammar; compiles the grammar if it is not
        cached. Raises GrammarError, and RequestError if the output could not end.
        """
        grammar = params.structured_output
        if grammar is None:
            return None
        assert isinstance(grammar, Grammar)
        fsm = self.grammars.get(grammar)
        if not fsm.vocabulary.end_ids:
            raise RequestError("This model has no end-of-sequence token, so an output with a grammar could not end.")
        return Constraint(grammar, fsm, fsm.initial_state)

    def masked(self, schedule: Schedule, rows: Sequence[SamplingRow]) -> list[SamplingRow]:
        """The sampling rows of a schedule, with masks for requests with a grammar unless the device computes them.

        The device does not if the pool is full, nor while ``min_tokens`` forbids the end: then the host must know
        whether the grammar allows anything else.
        """
        serials = [row.serial for row in rows] if len(rows) == len(schedule) else []
        if serials and serials == self.steady[0]:
            self.num_masks += self.steady[1]
            return list(rows)
        result, first, num_before = list(rows), 0, self.num_masks
        is_steady = bool(serials)
        for request, _, _, num_drafts, num_rows, _ in schedule:
            constraint = request.constraint
            if isinstance(constraint, Constraint) and num_rows:
                if not constraint.has_sampled:
                    constraint.has_sampled = True
                    if self.pool is not None:
                        constraint.base = self.pool.hold(constraint.grammar, constraint.fsm, constraint)
                if constraint.base is None or rows[first].masked_ids:
                    state = constraint.after(request.output_ids)
                    self._mask(result, first, constraint.fsm, state, [*request.draft_ids[:num_drafts], None][:num_rows])
                is_steady &= constraint.base is not None and not request.params.min_tokens
                self.num_masks += num_rows
            first += num_rows
        self.steady = (serials, self.num_masks - num_before) if is_steady else ([], 0)
        return result

    def _mask(
        self,
        rows: list[SamplingRow],
        first: int,
        fsm: TokenFSM,
        state: Configuration | None,
        draft_ids: Sequence[int | None],
    ) -> None:
        """Mask the rows from ``first`` on, each after the drafts before it; ``state`` is that of the first row."""
        for number, draft_id in enumerate(draft_ids, first):
            rows[number] = rows[number]._replace(constraint=None)
            if state is not None:
                allowed = fsm.mask(state)
                masked_ids = _masked(rows[number].masked_ids, allowed)
                rows[number] = rows[number]._replace(allowed=allowed, masked_ids=masked_ids)
                state = None if draft_id is None else fsm.next_state(state, draft_id)

    def _compile(self, grammar: Grammar) -> TokenFSM:
        return FSMCompiler(self.prepare(), self.limits).compile(grammar)


def _masked(masked_ids: Sequence[int], allowed: NDArray[np.bool_]) -> Sequence[int]:
    """The ids that ``min_tokens`` forbids; none if the grammar allows no others, since the output must then end."""
    if not masked_ids:
        return masked_ids
    rest = allowed.copy()
    rest[list(masked_ids)] = False
    return masked_ids if rest.any() else ()

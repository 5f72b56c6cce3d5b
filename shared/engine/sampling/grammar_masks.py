"""The sampler's steps that mask the tokens that grammars refuse. Introduced in phase 12.

A row's mask comes from the host, or is computed on the device (:mod:`shared.engine.sampling.grammar_rows`). Both are
applied before all other edits. Log-probabilities are still those of the raw logits.
"""

from collections.abc import Sequence
from operator import attrgetter

from shared.engine.sampling.drawing import Edit, Step, edit_by
from shared.engine.sampling.grammar_rows import GrammarRows
from shared.grammar.tokens.pool import GrammarPool
from shared.sampling.logit_mask import LogitMaskProcessor
from shared.sampling.sampler import SamplingRow

_ALLOWED = attrgetter("allowed")


def grammar_masks(max_rows: int, pool: GrammarPool | None) -> list[Step]:
    """The steps of a sampler of up to ``max_rows`` rows.

    Args:
        pool: the tables of the grammars whose masks the device computes; None: all masks come from the host.
    """
    return [host_masks] if pool is None else [host_masks, GrammarRows(max_rows, pool)]


def host_masks(rows: Sequence[SamplingRow], table_rows: Sequence[int]) -> Edit | None:
    """A :data:`shared.engine.sampling.drawing.Step`: the masks that come with the rows."""
    return edit_by(LogitMaskProcessor.of(list(map(_ALLOWED, rows))))

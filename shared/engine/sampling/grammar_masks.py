"""The sampler's steps that mask the tokens that grammars refuse. Introduced in phase 12.

A row brings its mask from the host, or the device finds it (:mod:`shared.engine.sampling.grammar_rows`). Both come
before everything else. Log-probabilities stay those of the raw logits.
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
        pool: the tables of the grammars whose masks the device finds; None: all masks come with the rows.
    """
    return [host_masks] if pool is None else [host_masks, GrammarRows(max_rows, pool)]


def host_masks(rows: Sequence[SamplingRow], places: Sequence[int]) -> Edit | None:
    """A :data:`shared.engine.sampling.drawing.Step`: the masks that the rows bring."""
    return edit_by(LogitMaskProcessor.of(list(map(_ALLOWED, rows))))

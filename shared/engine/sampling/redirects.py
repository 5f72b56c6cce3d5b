"""The step of the sampler that redirects tokens. Introduced in phase 11.1.

Log-probabilities stay those of the raw logits, since the edit is a copy.
"""

from collections.abc import Sequence

from shared.engine.sampling.drawing import Edit, edit_by
from shared.sampling.redirect import RedirectProcessor
from shared.sampling.sampler import SamplingRow


def redirects(rows: Sequence[SamplingRow], places: Sequence[int]) -> Edit | None:
    """A :data:`shared.engine.sampling.drawing.Step`: what ``SamplingRow.redirect`` asks for."""
    return edit_by(RedirectProcessor.of(rows))

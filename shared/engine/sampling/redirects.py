"""The sampler's step that redirects tokens. Introduced in phase 11.1.

Log-probabilities remain those of the raw logits, since the edit works on a copy.
"""

from collections.abc import Sequence

from shared.engine.sampling.drawing import Edit, edit_by
from shared.sampling.redirect import RedirectProcessor
from shared.sampling.sampler import SamplingRow


def redirects(rows: Sequence[SamplingRow], table_rows: Sequence[int]) -> Edit | None:
    """A :data:`shared.engine.sampling.drawing.Step`: redirects tokens as ``SamplingRow.redirect`` requests."""
    return edit_by(RedirectProcessor.of(rows))

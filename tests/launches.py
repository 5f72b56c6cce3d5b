"""Which kernels a step launches."""

from collections import Counter
from typing import Any

from shared.kernels.launch import LAUNCHES


def launched(engine: Any) -> Counter[str]:
    """The launches of one step, by kernel."""
    before = LAUNCHES.copy()
    engine.step()
    return LAUNCHES - before

"""Loading is at least as fast as transformers', in the same process and with imports out of the way."""

import statistics
import time
from pathlib import Path

import pytest
import torch

from benchmarks.timing import torch_threads
from shared.loading.loader import load_model
from shared.parity.reference import load_reference


@pytest.mark.demo
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.measured
def test_loading_beside_transformers(demo_folder: Path, dtype: torch.dtype) -> None:
    with torch_threads(2):
        load_reference(demo_folder, dtype)
        ratios = []
        for _ in range(7):
            start = time.perf_counter()
            load_model(demo_folder, dtype=dtype)
            middle = time.perf_counter()
            load_reference(demo_folder, dtype)
            ratios.append((time.perf_counter() - middle) / (middle - start))
    assert statistics.median(ratios) >= 0.95, ratios

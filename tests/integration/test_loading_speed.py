"""Loading reads each tensor once, and is at least as fast as transformers', imports aside."""

import statistics
import time
from pathlib import Path

import pytest
import torch

from benchmarks.timing import torch_threads
from shared.loading.checkpoint import Checkpoint
from shared.loading.loader import load_model
from shared.parity.reference import load_reference


def test_each_tensor_is_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    read = Checkpoint.tensor
    monkeypatch.setattr(Checkpoint, "tensor", lambda self, name: (names.append(name), read(self, name))[1])
    load_model(folder)
    assert sorted(names) == sorted(Checkpoint(folder).names)


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

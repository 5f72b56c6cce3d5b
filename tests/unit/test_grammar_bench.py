"""The benchmark of grammars: cases, ratios, and masks that are compared before they are timed."""

from pathlib import Path

import pytest
import torch

from benchmarks import grammar
from benchmarks.view import markdown


def test_the_engine_with_grammars_beside_one_without(tiny_checkpoints: dict[str, Path]) -> None:
    folder = str(tiny_checkpoints["llama"])
    report = grammar.measure_grammars(folder, device="cpu", num_requests=4, num_steps=6, trials=2)
    rows = report.results["engine"]
    assert list(rows) == ["11 free", "12 free", "12 half", "12 all"]
    assert rows["12 free"]["over_free"] == 1.0
    assert all(len(row["all"]) == 2 and row["tokens_per_second"] > 0 for row in rows.values())
    assert "12 half" in markdown(grammar.view(report))


def test_masks_are_compared_before_they_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "time_calls", lambda call, sets: call(*sets[0]) or 1e-6)
    found = grammar.measure_kernels(1000, torch.device("cpu"), 0, num_checks=20)
    assert found["compared"] == 20
    assert found["us"].keys() == grammar.BATCHES.keys()
    monkeypatch.setattr(grammar, "remove_refused", lambda *_: None)
    with pytest.raises(RuntimeError, match=r"differs from the CPU's"):
        grammar.measure_kernels(1000, torch.device("cpu"), 0, num_checks=20)

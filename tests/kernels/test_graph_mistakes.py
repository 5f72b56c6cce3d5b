"""The mistakes that `infer bench attention --mistakes` measures are slow, and not wrong."""

import pytest
import torch

import benchmarks.kernels.graph_cases as module
from benchmarks.kernels.case import compare, results_of, widened
from benchmarks.kernels.graph_cases import DEMO_SHAPES, mistaken, paged_case
from benchmarks.kernels.paged_cases import PagedSequences
from shared.kernels.launch import INTERPRETED

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
CALLS = {
    "widest": {"planned", "unsplit", "widest_table"},
    "tuned": {"planned", "tuned_outside", "tuned_inside"},
    "padded": {"planned", "all_compute"},
}


@pytest.mark.parametrize("shape", DEMO_SHAPES, ids=lambda shape: shape.name)
def test_a_mistake_changes_no_result(shape, monkeypatch):
    monkeypatch.setattr(module, "CANDIDATES", ((16, 32), (4,), (2,)))
    case = paged_case(PagedSequences(shape, DEVICE, 0), torch.float32)
    assert set(case.ours) == CALLS[shape.name.split("-")[0]]
    (inputs,) = case.draw(1, DEVICE)
    expected = results_of(case.op, tuple(map(widened, inputs)))
    assert len(expected[0]) == sum(length > 0 for length in shape.lengths)
    for name, call in case.ours.items():
        found = compare(call, inputs, expected, torch.float32)
        assert found["error"] is None, name
        assert found["launches"] >= 1


def test_a_line_that_is_not_in_the_kernel_is_refused():
    with pytest.raises(ValueError, match="has 0 times 'no such line'"):
        mistaken("no such line", "")

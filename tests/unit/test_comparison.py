"""What a comparison says where it fails; and that every test of an exercise compares so, or says what it means."""

import ast
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.comparison import assert_close, assert_equal, assert_rows_close, assert_within
from tutorial.workshop.exercises import ROOT, exercises

AXES = ("sequence", "token", "dim")


def said(check, *arguments, **options) -> list[str]:
    with pytest.raises(AssertionError) as raised:
        check(*arguments, **options)
    return str(raised.value).splitlines()


def test_the_first_wrong_element_has_the_names_of_its_axes_and_the_pattern_is_described() -> None:
    want = torch.arange(24.0).view(2, 3, 4)
    got = want.clone()
    got[1, 1:] += 0.5
    assert said(assert_close, got, want, "keys", AXES, atol=0.1) == [
        "keys, sequence 1, token 1, dim 0: expected 16, got 16.5",
        "8 of 24 elements are wrong (2 sequence × 3 token × 4 dim); each may be off by 0.1",
        "wrong: in sequence 1; right: sequence 0",
        "wrong: in token 1-2; right: token 0",
    ]
    assert_close(got, want, "keys", AXES, atol=0.5)
    got = want.clone()
    got[1] = torch.nan
    assert said(assert_equal, got, want, "keys", AXES)[2:] == [
        "wrong: all of sequence 1; right: sequence 0",
        "12 are NaN: computed from memory that was never written, or from 0 / 0",
    ]


def test_equal_infinities_are_equal_and_a_nan_never_is() -> None:
    numbers = torch.tensor([float("inf"), -float("inf"), 1.0])
    assert_close(numbers, numbers.clone(), "logits")
    assert_within(numbers.float(), numbers.double(), torch.zeros(3), "logits")
    assert said(assert_equal, torch.tensor([torch.nan]), torch.tensor([torch.nan]), "logits", ("token",))[0] == (
        "logits, token 0: expected nan, got nan"
    )
    assert "expected -inf, got 1" in said(assert_close, numbers[2:], numbers[1:2], "logits", rtol=1.0)[0]


@pytest.mark.parametrize(
    ("got", "message"),
    [
        (torch.zeros(2, 3), "keys: expected the shape [2, 4] (token, dim), got [2, 3]"),
        (torch.zeros(2, 4).double(), "keys: expected torch.float32, got torch.float64"),
        (None, "keys: expected Tensor, got None"),
    ],
)
def test_shape_and_dtype_come_before_numbers(got, message: str) -> None:
    assert said(assert_equal, got, torch.zeros(2, 4), "keys", ("token", "dim")) == [message]


def test_lists_say_the_place_and_both_in_full() -> None:
    assert said(assert_equal, [[1, 2], [3, 5]], [[1, 2], [3, 4]], "tables", ("table", "entry")) == [
        "tables, table 1, entry 1: expected 4, got 5",
        "in full: expected [[1, 2], [3, 4]]",
        "         got      [[1, 2], [3, 5]]",
    ]
    assert said(assert_equal, ["a|"], ["a|", "|a"], "drawing") == [
        "drawing: expected 2 entries, ['a|', '|a']; got 1, ['a|']"
    ]
    assert said(assert_equal, {"a": 3}, {"a": 4}, "grants", ("request",))[0] == "grants, request a: expected 4, got 3"
    assert said(assert_equal, 3, None, "blocks") == ["blocks: expected None, got 3"]
    assert said(assert_equal, np.array([1, 2]), np.array([1, 3]), "slots", ("token",))[0] == (
        "slots, token 1: expected 3, got 2"
    )


def test_rows_are_compared_by_their_own_size() -> None:
    want = torch.tensor([[1000.0, 1000.0], [1.0, 1.0]])
    got = want + 0.01
    assert said(assert_rows_close, got, want, 1e-3, "logits", ("token", "vocabulary"))[0].startswith("logits, token 1")
    assert_rows_close(got, want, 0.02, "logits")
    assert said(assert_rows_close, got * torch.nan, want, 1.0, "logits")[-1].startswith("4 are NaN")


def mapped_functions() -> Iterator[tuple[str, ast.AST]]:
    """Tests of exercises, and what they use of their own file."""
    names: dict[str, set[str]] = {}
    for exercise in exercises():
        for test in exercise.tests:
            path, _, rest = test.partition("::")
            names.setdefault(path, set()).add(rest.partition("::")[0].partition("[")[0])
    for path, used in names.items():
        nodes: dict[str, ast.AST] = {}
        for node in ast.parse((ROOT / path).read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                nodes[node.name] = node
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                nodes[node.targets[0].id] = node
        left = sorted(used)
        assert set(left) <= set(nodes)
        while left:
            node = nodes[left.pop()]
            yield path, node
            found = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
            found |= {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}  # fixtures
            left += sorted(found & set(nodes) - used)
            used |= found & set(nodes)


def test_no_assertion_of_an_exercise_s_test_is_without_a_message() -> None:
    """`assert False` tells a learner nothing: what is compared says so by `tests.comparison`, the rest in words."""
    bare = [
        f"{Path(path)}:{node.lineno}: {ast.unparse(node)}"
        for path, function in mapped_functions()
        for node in ast.walk(function)
        if (isinstance(node, ast.Assert) and node.msg is None)
        or (isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.testing."))
    ]
    assert not bare, "\n".join(bare)

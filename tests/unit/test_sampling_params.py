"""SamplingParams accepts what makes sense, normalises it, and refuses the rest with field, value and remedy."""

import math
from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from shared.errors import RequestError
from shared.sampling.params import SamplingParams


def test_defaults_filter_nothing():
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (1.0, 1.0, None, 1.0)
    assert (params.max_new_tokens, params.stop, params.seed, params.ignore_eos) == (128, (), None, False)
    assert not params.is_greedy


def test_greedy_is_temperature_zero():
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(temperature=-0.0).is_greedy
    assert not SamplingParams(temperature=1e-6).is_greedy


def test_instances_cannot_change():
    with pytest.raises(FrozenInstanceError):
        SamplingParams().temperature = 0.5


def test_values_become_plain_python():
    params = SamplingParams(temperature=1, top_p=np.float32(0.5), top_k=np.int64(3), seed=np.uint64(2**64 - 1))
    assert [type(v) for v in (params.temperature, params.top_p, params.top_k, params.seed)] == [float, float, int, int]
    assert params.seed == 2**64 - 1


@pytest.mark.parametrize(
    ("given", "kept"), [("END", ("END",)), (["a", "b"], ("a", "b")), (("a",), ("a",)), ((), ()), ([], ())]
)
def test_stop_becomes_a_tuple(given, kept):
    assert SamplingParams(stop=given).stop == kept


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", v) for v in (math.nan, math.inf, -math.inf, -0.1, 10**400, True, "0.7", None, [1.0], 1j)),
        *(("top_p", v) for v in (0, 0.0, -0.5, 1.0001, 2, math.nan, math.inf, True, "0.9", None)),
        *(("top_k", v) for v in (0, -1, 1.0, 2.5, True, False, "5", math.nan)),
        *(("repetition_penalty", v) for v in (0, -1.0, math.nan, math.inf, True, "1", None)),
        *(("max_new_tokens", v) for v in (0, -5, 1.5, True, "10", None)),
        *(("seed", v) for v in (-1, 2**64, 1.0, True, "1")),
        *(("stop", v) for v in ("", ("a", ""), [""], (1,), ["a", None], 3, None, b"x", {"a"})),
        *(("ignore_eos", v) for v in (0, 1, None, "yes")),
    ],
)
def test_bad_values_are_refused(field, value):
    with pytest.raises(RequestError) as error:
        SamplingParams(**{field: value})
    message = str(error.value)
    assert message.startswith(f"{field} is ")
    assert "must be" in message
    assert "\n" not in message
    if len(repr(value)) < 30:
        assert repr(value) in message


def test_a_refused_zero_top_k_says_how_to_lift_the_limit():
    with pytest.raises(RequestError, match=r"top_k is 0; it must be at least 1; leave it out for no limit\."):
        SamplingParams(top_k=0)


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_seeds_at_the_ends_are_fine(seed):
    assert SamplingParams(seed=seed).seed == seed

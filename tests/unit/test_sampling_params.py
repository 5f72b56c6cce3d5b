"""SamplingParams accepts what makes sense, normalises it, and refuses the rest with field, value and remedy."""

import math
from dataclasses import replace

import numpy as np
import pytest

from shared.errors import RequestError
from shared.sampling.params import LATER, SamplingParams, StructuredOutput


def test_values_become_plain_python():
    params = SamplingParams(temperature=1, top_p=np.float32(0.5), top_k=np.int64(3), seed=np.uint64(2**64 - 1))
    assert [type(v) for v in (params.temperature, params.top_p, params.top_k, params.seed)] == [float, float, int, int]
    assert (params.seed, params.is_greedy, SamplingParams(temperature=-0.0).is_greedy) == (2**64 - 1, False, True)
    for given, kept in (("END", ("END",)), (["a", "b"], ("a", "b")), ([], ())):
        assert SamplingParams(stop=given).stop == kept


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", v) for v in (math.nan, math.inf, -math.inf, -0.1, 10**400, True, "0.7", None, [1.0], 1j)),
        *(("top_p", v) for v in (0, 0.0, -0.5, 1.0001, 2, math.nan, math.inf, True, "0.9", None)),
        *(("top_k", v) for v in (0, -1, 1.0, 2.5, True, False, "5", math.nan)),
        *(("repetition_penalty", v) for v in (0, -1.0, math.nan, math.inf, True, "1", None)),
        *(("max_new_tokens", v) for v in (0, -5, 1.5, True, "10", None)),
        *(("min_p", v) for v in (-0.1, 1.1, math.nan, math.inf, True, "0.1", None)),
        *((f, v) for f in ("presence_penalty", "frequency_penalty") for v in (-2.1, 2.1, math.nan, True, "1", None)),
        *(("logit_bias", v) for v in ({-1: 1}, {"1": 1}, {True: 1}, {1: 101}, {1: -101}, {1: math.nan}, {1: True})),
        *(("logit_bias", v) for v in (None, [(1, 2)], (1, 2), ((1, 2, 3),), "1", dict.fromkeys(range(1025), 1.0))),
        *(("min_tokens", v) for v in (-1, 129, 1.0, True, None)),
        *(("stop_token_ids", v) for v in (5, None, "1", [-1], [1.0], [True], list(range(129)))),
        *(("prediction_ids", v) for v in (5, None, "1", [-1], [1.0], [True])),
        *((f, v) for f in ("logprobs", "prompt_logprobs") for v in (-1, 21, 1.0, True, "1")),
        *(("seed", v) for v in (-1, 2**64, 1.0, True, "1")),
        *(("stop", v) for v in ("", ("a", ""), [""], (1,), ["a", None], 3, None, b"x", {"a"})),
        *((flag, v) for flag in ("ignore_eos", "use_speculative_decoding") for v in (0, 1, None, "yes")),
        *(("cache_salt", v) for v in ("", "s" * 257, 5)),
        *((f, v) for f in ("thinking_budget", "min_thinking_tokens") for v in (-1, 1.0, True, "1")),
        ("structured_output", "[0-9]+"),
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


@pytest.mark.parametrize(
    ("field", "values"),
    {
        "temperature": [0, 1e9],
        "top_p": [1e-9, 1],
        "top_k": [1],
        "min_p": [0, 1],
        "repetition_penalty": [1e-9, 1e9],
        **{key: [-2, 2] for key in ("presence_penalty", "frequency_penalty")},
        "logit_bias": [((0, -100.0), (1, 100.0)), tuple((index, 1.0) for index in range(1024))],
        "min_tokens": [0, 128],
        "stop_token_ids": [tuple(range(128))],
        **{key: [0, 20] for key in ("logprobs", "prompt_logprobs")},
        "seed": [0, 2**64 - 1],
        "cache_salt": ["s", "s" * 256],
        "thinking_budget": [0],
    }.items(),
)
def test_values_at_the_limits_are_accepted(field, values):
    for value in values:
        assert getattr(SamplingParams(**{field: value}), field) == value


def test_what_contradicts_another_field_is_refused():
    for given, field in (
        ({"thinking_budget": 2, "min_thinking_tokens": 3}, "thinking_budget"),
        ({"structured_output": StructuredOutput(), "ignore_eos": True}, "ignore_eos"),
    ):
        with pytest.raises(RequestError, match=f"^{field} is "):
            SamplingParams(**given)
    SamplingParams(thinking_budget=3, min_thinking_tokens=3)


def test_each_field_that_changes_logits_or_thinking_does_so_alone():
    """And each that a later phase introduces is refused alone."""
    penalties, names = ["repetition_penalty", "presence_penalty", "frequency_penalty"], ["has_penalties"]
    changes = {name: {"has_penalties", "adjusts_logits"} for name in penalties} | {"logit_bias": {"adjusts_logits"}}
    changes |= {key: {"limits_thinking"} for key in ("thinking_budget", "min_thinking_tokens")}
    values = dict.fromkeys(changes, 2) | {"logit_bias": {1: 1}, "temperature": 2, "min_tokens": 2, "prompt_logprobs": 0}
    names += ["adjusts_logits", "limits_thinking"]
    for field, value in (values | {"structured_output": StructuredOutput()}).items():
        params = SamplingParams(**{field: value})
        assert {name for name in names if getattr(params, name)} == changes.get(field, set()), field
        params.check(LATER)
        if field not in LATER:
            params.check()
            continue
        with pytest.raises(RequestError, match=f"^{field} is .* the engine of phase {LATER[field]} does"):
            params.check(set(LATER) - {field})


def test_logit_bias_is_kept_as_pairs_in_the_order_of_the_ids():
    params = SamplingParams(logit_bias={7: 1, np.int64(3): -100})
    assert params.logit_bias == ((3, -100.0), (7, 1.0))
    assert replace(params, seed=1).logit_bias == params.logit_bias
    hash(params)


def test_nothing_is_generated_only_to_get_prompt_logprobs():
    assert SamplingParams(max_new_tokens=0, prompt_logprobs=0).max_new_tokens == 0
    with pytest.raises(RequestError, match=r"max_new_tokens is 0; it must be an integer of at least 1, or 0 together"):
        SamplingParams(max_new_tokens=0)


@pytest.mark.parametrize("given", [{"min_tokens": 4, "max_new_tokens": 3}, {"min_tokens": 129}])
def test_min_tokens_does_not_exceed_the_longest_output(given):
    with pytest.raises(
        RequestError, match=r"min_tokens is \d+; it must be an integer from 0 to max_new_tokens, which is \d+\."
    ):
        SamplingParams(**given)


@pytest.mark.parametrize(
    "given", [{"logit_bias": {3: 1.0, 100: 1.0}}, {"stop_token_ids": [3, 100]}, {"prediction_ids": [3, 100]}]
)
def test_ids_outside_the_vocabulary_are_refused_by_field(given):
    params = SamplingParams(**given)
    params.check_token_ids(101)
    with pytest.raises(RequestError, match=rf"{next(iter(given))} is 100; it must be .* from 0 to 99\."):
        params.check_token_ids(100)

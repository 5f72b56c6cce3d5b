"""Schedulers and pools agree in any order of calls, and in fixed ones that provoke what is rare."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from shared.scheduling import chunks
from shared.text.tokenizer import Tokenizer
from tests.unit.machine_settings import NO_INTERVAL, SETTINGS
from tests.unit.scheduling_machine import Choice, SchedulingMachine

Calls = list[tuple[str, int, dict[str, Any]]]
"""A rule, how often it is called, and its arguments."""

BLOCKS_OF_TWO = {"block_size": 2, "max_batch_size": 4, "prefill_chunk_size": 5}
SPECULATIVE = BLOCKS_OF_TWO | {
    "max_decode_interval": NO_INTERVAL,
    "use_speculative_decoding": True,
    "spec_length": 3,
    "adapt_spec_length": False,
}
SMALL = {
    "static": Choice({"batching_mode": "static", "max_batch_size": 2}, 2),
    "continuous": Choice({"batching_mode": "continuous", "max_batch_size": 2}, 2),
    "preemptive": Choice({"block_size": 2, "max_batch_size": 4}, 8),
    "chunked": Choice(BLOCKS_OF_TWO, 8),
    "prefix": Choice(BLOCKS_OF_TWO, 11),
    "overlapped": Choice(BLOCKS_OF_TWO | {"max_decode_interval": NO_INTERVAL, "use_prefix_caching": True}, 11),
    "drafts": Choice(SPECULATIVE | {"drafter": "ngram", "use_prefix_caching": True}, 8),
    "draft model": Choice(SPECULATIVE | {"draft_model": "a draft model"}, 8),
    "masks of 11.1": Choice(SPECULATIVE | {"adapter": "an adapter", "use_prefix_caching": True}, 8),
    "segments of 9.1": Choice(BLOCKS_OF_TWO | {"max_decode_interval": NO_INTERVAL, "use_prefix_caching": True}, 10),
}
STORM: Calls = [("add_a_crowd", 1, {"prompts": [3, 2, 1, 4]}), ("step", 12, {})]
PREFIXES: Calls = [
    ("add", 3, {"prompt": 8, "answer": 3}),  # the second and the third wait for the first, then copy its last block
    ("step", 12, {}),
    ("add_the_next_turn", 1, {"number": 0, "cut": 0, "more": 1, "answer": 3}),
    ("step", 3, {}),
    *STORM,  # takes the cached blocks
]
DRAFTS: Calls = [
    ("add", 2, {"prompt": 2, "answer": 12}),
    ("step", 2, {}),
    ("step", 1, {"share_right": 1}),
    ("step", 1, {"share_right": 0}),
    ("break_off", 1, {"num_committed": 0, "is_new": True}),
    ("step", 2, {"most_drafts": 0}),
    ("step", 12, {"share_right": 1}),
    ("add", 1, {"prompt": 2, "answer": 3}),  # too short for masks
    ("step", 2, {}),
    ("step", 1, {"fails": {0}}),
    *STORM,
]
SEGMENTS: Calls = [
    ("register", 1, {"role": "a", "count": 5, "is_wanted": True}),
    ("register", 1, {"role": "b", "count": 3}),
    ("ask", 2, {"numbers": [0, 1, 0], "own": 2, "answer": 3}),
    ("step", 8, {}),
    ("evict", 1, {"count": 9}),
    ("ask", 1, {"numbers": [0], "own": 1, "answer": 2}),
    ("step", 4, {}),
    ("evict", 1, {"count": 9}),
    ("ask", 2, {"numbers": [1], "own": 1, "answer": 2}),
    ("step", 2, {"fails": {0}}),  # the segment, and with it those that wait for it
    ("step", 2, {}),
    *[("register", 1, {"role": "a", "count": count}) for count in range(1, 6)],  # more than are remembered
    *[("register", 1, {"role": "b", "count": count}) for count in (1, 2, 3)],
    ("ask", 1, {"numbers": [0, 1, 2], "own": 1, "answer": 1}),
    ("register", 1, {"role": "a", "count": 9}),  # requests name all that are remembered
    *STORM,
    ("step", 40, {}),
    ("register", 1, {"role": "b", "count": 9, "is_wanted": True}),  # stays at the end, without users
]


ENDS: Calls = [
    ("add", 3, {"prompt": 3, "answer": 9}),
    ("step", 2, {}),
    ("step", 1, {"end": 0}),  # the step in flight computes it once more
    ("break_off", 1, {"num_committed": 0, "is_new": False}),
    ("step", 3, {}),
    ("step", 1, {"fails": {0}}),
    ("break_off", 1, {"num_committed": 1, "is_new": True, "fails": {0}}),
    ("abort", 2, {"number": 0, "is_id_reused": True}),
]


class ByHand:
    """Calls a machine's rules, each followed by the checks of every state, as Hypothesis does."""

    def __init__(self, name: str, tokenizer: Tokenizer, choice: Choice) -> None:
        self.machine = SchedulingMachine(SETTINGS[name], tokenizer)
        self.machine.begin(choice)

    def run(self, calls: Calls) -> dict[str, int]:
        """Returns how often the machine has met what."""
        for rule, times, arguments in calls:
            for _ in range(times):
                getattr(self.machine, rule)(**arguments)
                self.machine.check_state()
        self.machine.teardown()
        return self.machine.met


@pytest.fixture(autouse=True)
def _quiet_and_small(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without messages; the default chunks have a few tokens, as the machine's prompts do."""
    caplog.set_level("CRITICAL")
    monkeypatch.setattr(chunks, "ALONE", 8)
    monkeypatch.setattr(chunks, "BESIDE_DECODING", 4)


@pytest.mark.parametrize("name", SETTINGS)
def test_any_order_of_calls(tokenizer: Tokenizer, name: str) -> None:
    size = settings(max_examples=40, stateful_step_count=30)
    run_state_machine_as_test(lambda: SchedulingMachine(SETTINGS[name], tokenizer), settings=size)


@pytest.mark.parametrize("num_in_flight", [0, 1])
@pytest.mark.parametrize(
    ("name", "calls", "expected"),
    [
        *[(name, ENDS, "failed") for name in ("static", "continuous")],
        ("preemptive", ENDS + STORM, "failed, preempted"),
        ("chunked", ENDS + STORM, "failed, preempted"),
        ("prefix", ENDS + PREFIXES, "failed, preempted, hits, copies, waits, evicted"),
        ("overlapped", ENDS + PREFIXES, "failed, preempted, hits, copies, waits, evicted"),
        ("drafts", DRAFTS, "preempted, hits, evicted, accepted, rejected, short"),
        ("draft model", DRAFTS, "preempted, hits, evicted, accepted, rejected"),
        ("masks of 11.1", DRAFTS, "preempted, hits, evicted, accepted, rejected, short, failed, masks"),
        (
            "segments of 9.1",
            SEGMENTS,
            "preempted, computed, recomputed, segments evicted, shared, failed, forgotten, full",
        ),
    ],
    ids=list(SMALL),
)
def test_what_is_rare_is_met(tokenizer: Tokenizer, name: str, calls: Calls, expected: str, num_in_flight: int) -> None:
    met = ByHand(name, tokenizer, replace(SMALL[name], num_in_flight=num_in_flight, max_bytes=2000)).run(calls)
    assert all(met[what] for what in expected.split(", ")), met
    if num_in_flight:
        assert met["ending"] or calls in (DRAFTS, SEGMENTS), (
            "a step was dropped that computed a request which had ended"
        )
        # Later schedulers wait for the ends before they preempt.
        assert bool(met["preempted in flight"]) == (name in ("preemptive", "chunked", "prefix"))

"""What the tests of contiguous and of paged pools have in common: a model of a pool, and steps for its view."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shared.cache.layout.slots import Layout
from shared.cache.view.contiguous import ContiguousCache, ContiguousView
from shared.cache.view.interface import BatchView
from shared.engine.batch import Batch
from shared.engine.request import Request
from shared.errors import CapacityError
from shared.models.causal_lm import CausalLM
from shared.scheduling.schedule import Schedule, Scheduled
from tests.comparison import assert_close, assert_equal
from tests.steps import arrays_of, commit, make_request, step_of

NAMES = "aabbc"  # ids that are used again while the first request that had them may still hold memory
NUMBERS = st.sampled_from(range(len(NAMES)))
TOKENS = st.integers(-1, 11) | st.integers(-1, 25)
STEPS = [  # prompts of different lengths; all decode; a part decodes; a prompt beside; several tokens at once
    {"a": 5, "b": 1, "c": 20},
    {"a": 1, "b": 1, "c": 1},
    {"c": 1, "a": 1},
    {"d": 17, "b": 1},
    {"d": 2, "a": 3, "c": 1},
    {"d": 1},
    {"b": 1, "d": 1, "c": 1, "a": 1},
]


class PoolMachine(RuleBasedStateMachine):
    """Grants and lengths in plain dicts, beside the pool."""

    pool: Any

    def set_up(self, pool: Any, capacity: int) -> None:
        self.pool, self.capacity = pool, capacity
        self.requests = [make_request(name) for name in NAMES]
        self.granted: dict[Request, int] = {}
        self.lengths: dict[Request, int] = {}
        self.layouts: list[tuple[Layout, list[list[int]]]] = []

    def fits(self, request: Request, tokens: int) -> bool:
        raise NotImplementedError

    def left_to_reserve(self, chosen: list[Request]) -> list[Request]:
        """Those of which the pool does not reserve the next token with those of all."""
        raise NotImplementedError

    def expected_layout(self, chosen: list[Request], offsets: list[tuple[int, int]]) -> list[list[int]]:
        """The arrays of a layout in which each request writes from a place up to another."""
        raise NotImplementedError

    def held(self, request: Request) -> list[int]:
        """What a request holds; to reserve or truncate moves nothing."""
        return list(self.pool.holdings()[1].get(request, ()))

    @rule(number=NUMBERS, tokens=TOKENS)
    def reserve(self, number: int, tokens: int) -> None:
        """Also to grow what a request has."""
        request = self.requests[number]
        if not 0 <= tokens <= self.capacity:
            with pytest.raises(CapacityError, match=rf"asks for {tokens} tokens and .* has {self.capacity}\b"):
                self.pool.reserve(request, tokens)
            return
        fits, before = self.fits(request, tokens), self.held(request)
        assert_equal(self.pool.admit(request), 0, "tokens that an admitted request already has")
        assert_equal(self.pool.reserve(request, tokens), fits, f"reserve({request.request_id}, {tokens})")
        assert_equal(self.held(request)[: len(before)], before, "what the request held already", ("place",))
        if fits:
            self.granted[request] = max(self.granted.get(request, 0), tokens)
            self.lengths.setdefault(request, 0)

    @rule(number=NUMBERS)
    def refuse_what_holds_nothing(self, number: int) -> None:
        request = self.requests[number]
        for call in () if request in self.granted else (self.pool.commit, self.pool.truncate, self.pool.shrink):
            with pytest.raises(CapacityError):
                call(request, 0)

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), is_one=st.booleans())
    def commit(self, data: st.DataObject, is_one: bool) -> None:
        """Some of what is reserved, or a token too many."""
        request = data.draw(st.sampled_from(list(self.granted)))
        room = self.granted[request] - self.lengths[request]
        tokens = 1 if is_one else data.draw(st.integers(-1, room + 1))
        if not 0 <= tokens <= room:
            with pytest.raises(CapacityError):
                self.pool.commit_next([request]) if is_one else self.pool.commit(request, tokens)
            return
        self.pool.commit_next([request]) if is_one else self.pool.commit(request, tokens)
        self.lengths[request] += tokens

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(list(self.granted)))
        tokens = data.draw(st.integers(-1, self.lengths[request] + 1))
        if not 0 <= tokens <= self.lengths[request]:
            with pytest.raises(CapacityError):
                self.pool.truncate(request, tokens)
            return
        before = self.held(request)
        self.pool.truncate(request, tokens)
        assert_equal(self.held(request), before, "what the request holds; the grant is kept", ("place",))
        self.lengths[request] = tokens

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), tokens=st.integers(0, 25))
    def shrink(self, data: st.DataObject, tokens: int) -> None:
        """What is written stays granted."""
        request = data.draw(st.sampled_from(list(self.granted)))
        self.pool.shrink(request, tokens)
        self.granted[request] = max(self.lengths[request], min(tokens, self.granted[request]))

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def reserve_next(self, data: st.DataObject) -> None:
        """A token more for some of those that hold memory, all blocks that they lack at once or none."""
        chosen = data.draw(st.lists(st.sampled_from(list(self.granted)), unique=True))
        for request in chosen:
            request.num_tokens = min(self.granted[request] + data.draw(st.integers(0, 1)), self.capacity)
        others = self.left_to_reserve(chosen)
        assert_equal(self.pool.reserve_next(chosen), others, "requests that are left to reserve")
        self.granted |= {request: request.num_tokens for request in chosen if request not in others}

    @rule(number=NUMBERS)
    def release(self, number: int) -> None:
        request = self.requests[number]
        self.pool.release(request)
        self.granted.pop(request, None)
        self.lengths.pop(request, None)

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def lay_out(self, data: st.DataObject) -> None:
        """New tokens after those that steps in flight compute; positions (``start``) say nothing of lengths."""
        chosen = data.draw(st.lists(st.sampled_from(list(self.granted)), unique=True))
        entries, offsets = [], []
        for request in chosen:
            in_flight, new = data.draw(st.integers(0, 2)), data.draw(st.integers(1, 6))
            request.num_computed_tokens = data.draw(st.integers(0, 9))
            entries.append(Scheduled(request, request.num_computed_tokens + in_flight, new))
            first = self.lengths[request] + in_flight
            offsets.append((first, first + new))
        schedule = Schedule(1, tuple(entries))
        if any(end > self.granted[request] for request, (_, end) in zip(chosen, offsets, strict=True)):
            with pytest.raises(CapacityError, match="are reserved"):
                self.pool.layout(schedule)
            return
        self.layouts.append((self.pool.layout(schedule), self.expected_layout(chosen, offsets)))

    @invariant()
    def requests_have_what_the_model_says(self) -> None:
        lengths = [self.lengths.get(request, 0) for request in self.requests]
        assert_equal([self.pool.length(request) for request in self.requests], lengths, "lengths", ("request",))
        assert_equal(self.pool.used_tokens, sum(lengths), "used tokens")
        assert_equal(set(self.pool.holdings()[1]), set(self.granted), "requests that hold memory")

    @invariant()
    def layouts_do_not_change_when_the_pool_goes_on(self) -> None:
        for layout, expected in self.layouts:
            assert_equal(arrays_of(layout), expected, "arrays of a layout", ("array", "entry"))


def check_beside_caches(
    model: CausalLM, pool: Any, view: BatchView, backend: str | None, granted: Callable[[int], int], rtol: float = 0.0
) -> None:
    """Write and attend in each of STEPS, beside a contiguous cache for each sequence, in memory that is NaN where
    nothing was written. ``granted``: the tokens to reserve for a sequence that will have so many."""
    shape, generator = model.config, torch.Generator().manual_seed(0)
    view.keys.fill_(torch.nan)
    view.values.fill_(torch.nan)
    caches = {name: ContiguousCache(shape, 32, torch.float32) for name in "abcd"}
    alone = {n: ContiguousView(cache, "naive" if backend == "naive" else "sdpa") for n, cache in caches.items()}
    requests = {name: make_request(name) for name in "abcd"}
    for step in STEPS:
        for name, new in step.items():
            assert pool.reserve(requests[name], granted(caches[name].length + new)), "refused with enough of it free"
        schedule = step_of({requests[name]: new for name, new in step.items()})
        tokens, logit_rows, _ = view.load(Batch.of(schedule, pool))
        assert_equal(tokens.ids.tolist(), tokens.positions.tolist(), "positions", ("token",))
        assert_equal(
            logit_rows.tolist(),
            (np.cumsum(list(step.values())) - 1).tolist(),
            "logit rows: the last token of each sequence",
            ("sequence",),
        )
        for name, new in step.items():
            alone[name].prepare(new)
        T = sum(step.values())
        for layer, block in enumerate(model.blocks):
            attention = block.attention
            q = torch.randn(T, shape.num_heads, shape.head_dim, generator=generator)
            k, v = torch.randn(2, T, shape.num_kv_heads, shape.head_dim, generator=generator)
            options = {
                "scale": attention.scale,
                "window": attention.window,
                "softcap": (attention.softcap, 0.5)[layer % 2],
            }
            ours = view.attend(layer, view.write(layer, q, k, v, tokens.positions, attention.qk), **options)
            theirs, start = [], 0
            for name, new in step.items():
                part = slice(start, start := start + new)
                one = alone[name]
                rotated = one.write(layer, q[part], k[part], v[part], tokens.positions[part], attention.qk)
                theirs.append(one.attend(layer, rotated, **options))
            what = f"attention in step {step}, layer {layer}"
            assert_close(ours, torch.cat(theirs), what, ("token", "head", "dim"), rtol=rtol, atol=rtol / 10)
        commit(pool, schedule)
        for name, new in step.items():
            caches[name].advance(new)
    assert_equal(pool.used_tokens, sum(cache.length for cache in caches.values()), "used tokens")


def check_a_step_made_again(pool: Any, view: Any, slots: list[int]) -> None:
    """A forward that failed is run again from the same offsets. ``slots``: of a token of request a and four of b."""
    a, b = make_request("a"), make_request("b")
    pool.reserve(a, 10)
    pool.reserve(b, 10)
    commit(pool, step_of({a: 3}))
    both = Batch.of(step_of({a: 1, b: 4}), pool)
    assert_equal(both.layout.slot_mapping.tolist(), slots, "slots of a, then of b", ("token",))
    view.load(both)
    offsets = view.offsets.clone()
    per_token = len(offsets) // 5  # one, or one for each head
    view.load(Batch.of(step_of({b: 4}), pool))
    assert_equal(view.offsets.tolist(), offsets[per_token:].tolist(), "offsets that b writes alone", ("place",))
    view.load(Batch.of(step_of({a: 1, b: 4}), pool))
    assert_equal(view.offsets, offsets, "offsets, the step made again", ("place",))
    counted = [line.partition(" with ")[2] for line in pool.audit()]
    assert_equal(counted, ["3 tokens of 10 reserved.", "0 tokens of 10 reserved."], "audit of a and b", ("request",))

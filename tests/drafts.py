"""Drafts that are known to be right or wrong, and what a step with drafts leaves behind."""

import random
from collections.abc import Sequence
from typing import Any

import torch

from shared.cache.pool.prefix import PrefixSharing
from shared.engine.request import Request, RequestStatus
from shared.grammar.constraint import Constraint
from shared.sampling.params import SamplingParams
from shared.scheduling.schedule import Schedule
from shared.speculation.drafter import NoDrafter
from tests.mixed_requests import Requests, seen, serve, tokens


class Foresight(NoDrafter):
    """Proposes what the answers will be, with one token wrong in some of the proposals."""

    def __init__(self, answers: Sequence[Sequence[int]], error_rate: float, seed: int = 0) -> None:
        self.answers, self.error_rate, self.chance = answers, error_rate, random.Random(seed)

    def propose(self, schedule: Schedule) -> None:
        for request, *_, num_drafts, _, _ in schedule:
            request.draft_ids = []
            if num_drafts and request.status is RequestStatus.RUNNING:
                done = len(request.output_ids)
                drafts = [*self.answers[int(request.request_id)][done : done + num_drafts]]
                if drafts and self.chance.random() < self.error_rate:
                    drafts[self.chance.randrange(len(drafts))] ^= 1
                request.draft_ids = drafts


def num_refused(request: Request) -> int:
    """How many drafts of a request its grammar refuses, up to its end: none or one."""
    constraint = request.constraint
    if not isinstance(constraint, Constraint):
        return 0
    state = constraint.after(request.output_ids)
    for token_id in request.draft_ids:
        if token_id in request.end_ids or state is None:
            break
        state = constraint.fsm.next_state(state, token_id)
        if state is None:
            return 1
    return 0


def assert_greedy_same_and_others_repeatable(twice: Sequence[Any], requests: Requests, plain: Any) -> None:
    """What rejection sampling promises of two engines: greedy tokens of a ``plain`` one, and the same tokens again."""
    answers = serve(plain, requests)[0]
    found, again = (serve(engine, requests)[0] for engine in twice)
    assert seen(found) == seen(again)
    is_same = [tokens(mine) == tokens(theirs) for mine, theirs in zip(found, answers, strict=True)]
    is_greedy = [params.get("temperature") == 0 for _, params in requests]
    assert all(same for same, greedy in zip(is_same, is_greedy, strict=True) if greedy)
    assert not all(is_same), "sampled tokens differ"


def check_commits(engine: Any) -> None:
    """After each commit, check that the pool holds what requests have computed, and nothing of other requests."""
    commit = engine.scheduler.commit

    def checking(schedule: Schedule, sampled: Any) -> None:
        commit(schedule, sampled)
        for request in schedule.requests:
            if request.status is RequestStatus.RUNNING:
                assert engine.pool.length(request) == request.num_computed_tokens
        assert len(engine.pool.audit()) == len(engine.pool.holdings()[1])

    engine.scheduler.commit = checking


def assert_no_trace(plain: Any, drafting: Any, requests: Requests) -> None:
    """At each length that both runs reach, counts, tables, tree, keys and values are the same."""
    expected, found = states_of(plain, requests), states_of(drafting, requests)
    assert len(found) < len(expected)
    for length, (counts, keys) in found.items():
        assert counts == expected[length][0]
        torch.testing.assert_close(keys, expected[length][1], rtol=1e-4, atol=1e-5)


def states_of(engine: Any, requests: Requests) -> dict[int, tuple[list[int], torch.Tensor]]:
    """By the number of known tokens: what the pool counts after a step, and the keys and values of the last layer."""
    ((prompt, params),), states = requests, {}
    name, pool = engine.add_request(prompt, SamplingParams(**params)), engine.pool
    while engine.has_work():
        engine.step()
        request = engine.scheduler.running.get(name)
        if request is None:
            break
        tables = pool.holdings()[1]
        counts = [pool.length(request), pool.used_tokens, pool.free_tokens, len(tables[request])]
        counts += [request.num_computed_tokens, request.num_scheduled_tokens, request.num_pending_tokens]
        if isinstance(sharing := getattr(pool, "extension", None), PrefixSharing):
            tree = sharing.tree
            counts += [tree.num_blocks, tree.num_unused_blocks, sharing.prefixes[request].num_blocks]
        parts = [part[-1][tables[request]] for part in (engine.view.keys, engine.view.values)]  # of the last layer
        if engine.config.kv_cache_backend == "contiguous":
            parts = [part.transpose(1, 2) for part in parts]
        rows = [part.flatten(0, 1)[: pool.length(request)] for part in parts]
        states[request.num_tokens] = counts, torch.stack(rows)
    return states

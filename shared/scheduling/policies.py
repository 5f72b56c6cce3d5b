"""How prefill and decode share a step. Introduced in phase 5.

A prefill takes as long as many decode steps and delays the requests that decode in the same step. Skipping their
decode makes the step shorter, so the next prefill starts sooner; policies differ in how much they skip. With N =
``max_decode_interval``:

    policy              prefills in a step                 decodes in a step with prefills          optimizes for
    fcfs                all that fit the token budget      all n decoding requests                  inter-token latency
    prefill_first       all that fit the token budget      none; all n once one of them has         time to first token
                                                           waited N steps
    decode_round_robin  one                                the n / N that have waited longest,      even step times
                                                           and all that have waited N steps

Under every policy a step without prefills decodes all requests. Under every policy prefills run in the order of
admission and the first runs in the next step, so none starves. Invariant: a request that has waited N steps decodes.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from shared.engine.request import Request
from shared.scheduling.scheduler import Scheduler

Item = TypeVar("Item")


@dataclass(frozen=True)
class Policy:
    """One row of the table.

    ``turns(steps_since, N)`` returns for each decoding request whether it decodes in a step with prefills.
    ``steps_since`` counts the steps since each request's last token: 1 if it got a token in the previous step.
    """

    max_prompts: int | None
    turns: Callable[[Sequence[int], int], list[bool]]

    def share(
        self, decoding: list[Item], prompts: list[Item], steps_since: Sequence[int], interval: int
    ) -> tuple[list[Item], list[Item]]:
        """Select the decoding requests and the prompts that run in a step."""
        if not prompts:
            return decoding, prompts
        turns = self.turns(steps_since, interval)
        return [item for item, has_turn in zip(decoding, turns, strict=True) if has_turn], prompts[: self.max_prompts]


def always(steps_since: Sequence[int], interval: int) -> list[bool]:
    """Every request decodes in every step."""
    return [True] * len(steps_since)


def when_due(steps_since: Sequence[int], interval: int) -> list[bool]:
    """All requests decode once one of them has waited ``interval`` steps; none before."""
    # exercise 05x1: pause decoding during prefill, until a request is due
    # hint: all requests get the same answer: has any of them waited interval steps?
    # hint: steps_since may be empty
    return [max(steps_since, default=0) >= interval] * len(steps_since)
    # end exercise


def in_turn(steps_since: Sequence[int], interval: int) -> list[bool]:
    """The n / ``interval`` requests that have waited longest decode, and so do all that have waited ``interval``
    steps."""
    # exercise 05x2: an even share, in turn
    # hint: n / interval of the n requests get a token, rounded up: those that have waited longest
    # hint: every request that has waited interval steps gets one too, even above that share
    # hint: ties go to the requests with the lower index
    # hint: sort the indices or take heapq.nlargest; then make one bool for each request, in the given order
    share = -(-len(steps_since) // interval)
    longest = set(heapq.nlargest(share, range(len(steps_since)), key=lambda n: (steps_since[n], -n)))
    return [n in longest or steps >= interval for n, steps in enumerate(steps_since)]
    # end exercise


POLICIES = {
    "fcfs": Policy(None, always),
    "prefill_first": Policy(None, when_due),
    "decode_round_robin": Policy(1, in_turn),
}
"""The policies by the values of ``EngineConfig.scheduler_policy``."""


def share(scheduler: Scheduler, decoding: list[Request], prompts: list[Request]) -> tuple[list[Request], list[Request]]:
    """The decoding requests and the prompts that run in the step of ``scheduler.num_steps``, by the policy."""
    # exercise 05x3: let the policy choose
    # hint: config.scheduler_policy names the policy; its share selects from both
    # hint: it takes the steps since the last token of each decoding request: num_steps minus last_step
    config = scheduler.config
    steps_since = [scheduler.num_steps - request.last_step for request in decoding]
    return POLICIES[config.scheduler_policy].share(decoding, prompts, steps_since, config.max_decode_interval)
    # end exercise

"""How prompts and decoding share a step. Introduced in phase 5.

A prompt's forward takes as long as many decoding steps, and whoever decodes beside it waits for it. To decode nobody
makes such a step shorter, and the next prompt comes sooner; policies differ in how far they go. With
N = ``max_decode_interval``:

    policy              prompts of a step                  who decodes beside prompts               gains
    fcfs                all that fit the token budget      everybody, in every step                 no token waits
    prefill_first       all that fit the token budget      nobody; everybody as soon as one has     first tokens
                                                           waited N steps
    decode_round_robin  one                                the n / N that have waited longest,      steps of even
                                                           and who has waited N steps               length

In a step without prompts everybody decodes, under every policy. Prompts come in the order of admission, under every
policy, and the first of them is run in the next step, so none starves. Invariant: whoever has waited N steps decodes.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True)
class Policy:
    """One row of the table.

    ``turns(steps_since, N)`` says of each decoding request whether it decodes beside prompts, from the steps since its
    last token: 1 for one that got a token in the step before.
    """

    max_prompts: int | None
    turns: Callable[[Sequence[int], int], list[bool]]

    def share(
        self, prompts: Sequence[Item], decoding: Sequence[Item], steps_since: Sequence[int], interval: int
    ) -> tuple[Sequence[Item], Sequence[Item]]:
        """The decoding requests, and the prompts, that take part in a step, of those that could."""
        if not prompts:
            return decoding, prompts
        turns = self.turns(steps_since, interval)
        return [item for item, has_turn in zip(decoding, turns, strict=True) if has_turn], prompts[: self.max_prompts]


def everybody(steps_since: Sequence[int], interval: int) -> list[bool]:
    """All, at any time."""
    return [True] * len(steps_since)


def when_due(steps_since: Sequence[int], interval: int) -> list[bool]:
    """All at once, when the first has waited ``interval`` steps; nobody before."""
    # exercise 05x1: nobody beside prompts, until somebody is due
    # hint: one answer for all of them: has anybody waited interval steps?
    # hint: there may be nobody who decodes
    return [max(steps_since, default=0) >= interval] * len(steps_since)
    # end exercise


def in_turn(steps_since: Sequence[int], interval: int) -> list[bool]:
    """An even share of them, those that have waited longest, and all that have waited ``interval`` steps."""
    # exercise 05x2: an even share, in turn
    # hint: of n requests, n / interval get a token, rounded up: those that have waited longest
    # hint: whoever has waited interval steps gets one too, even above that share
    # hint: among those that have waited equally long, the first come first
    # hint: sort the indices or take heapq.nlargest; then make one bool for each request, in the given order
    share = -(-len(steps_since) // interval)
    longest = set(heapq.nlargest(share, range(len(steps_since)), key=lambda n: (steps_since[n], -n)))
    return [n in longest or steps >= interval for n, steps in enumerate(steps_since)]
    # end exercise


POLICIES = {
    "fcfs": Policy(None, everybody),
    "prefill_first": Policy(None, when_due),
    "decode_round_robin": Policy(1, in_turn),
}
"""By the name that ``EngineConfig.scheduler_policy`` knows."""

"""Chooses how many drafts each request gets, from their acceptance and their cost. Introduced in phase 11.

If each of a request's drafts is accepted with probability a, its j-th draft in a step yields a token with probability
a^j, since all earlier drafts must be accepted too. Verification costs little while a step is memory-bound, and a lot in
a large, compute-bound batch. So all drafts of a step are sorted by their probability, and the first n are computed,
where n maximizes tokens per second. The cost of a step comes from a table (:mod:`shared.scheduling.step_costs`), never
from a clock.

The best n may be 0 for a request, or for all. Then a single draft is tried occasionally, since the text may become
predictable. The intervals grow fourfold each time and end at the same steps for all requests, because a step with
drafts cannot be prepared while the previous step runs. They are longer if an attempt costs more, so that useless drafts
take at most 3 % of the time of a long answer. A drafter that repeatedly finds nothing is asked at such intervals too.
If even perfect drafts would cost more time than they save, none are tried. Drafts that are almost never accepted are
abandoned regardless of cost, so that a wrong table does little harm.

Invariants: a request's estimate depends only on its own drafts. Lengths depend only on counts and the table, so they
are the same in every run. Coupled acceptance gives the same tokens for any lengths. With rejection sampling the tokens
depend on the lengths, so they are reproducible because the lengths are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from shared.engine.config import EngineConfig
from shared.engine.request import Request

MEMORY = 0.9
"""The weight of a step's evidence one step later: the estimate covers about the last ten steps."""
LONGEST_WAIT = 64
"""Maximum steps between attempts, if an attempt costs no more than two plain steps."""
FIRST_WAIT_PER_COST, LONGEST_WAIT_PER_COST = 8, 48
"""Minimum plain steps between attempts for each plain step that an attempt costs: at first, and in the end."""
PATIENCE = 4
"""Consecutive steps in which a drafter may find nothing before it is asked less often."""
LEAST_RATE = 0.1
"""The acceptance rate below which only attempts are made, however cheap drafts are according to the table."""


class DraftCosts(NamedTuple):
    """The cost of steps of B decoding requests, in any unit.

    ``plain`` is a step without drafts, prepared while another runs; ``short`` and ``long`` are steps that verify one
    draft, or the maximum, for each request, and are waited for. ``first`` and ``more`` are forwards of the draft model:
    ``first`` with the two tokens per request that the model lacks if all drafts of the previous step were accepted,
    ``more`` with one.
    """

    plain: float
    short: float
    long: float
    first: float
    more: float


CostsOf = Callable[[int, int, int], DraftCosts]
"""The costs for a number of requests, the sum of their tokens in the KV cache, and the maximum number of drafts of one.
"""


def a_tenth(num_requests: int, context: int, longest: int) -> DraftCosts:
    """Without a draft model there is no table, and a draft costs a tenth of a step."""
    return DraftCosts(1.0, 1.1, 1.0 + longest / 10, 0.0, 0.0)


@dataclass
class Acceptance:
    """What is known about a request's drafts; initially, as if one out of one and a half drafts had been accepted."""

    num_accepted: float = 1.0
    num_judged: float = 1.5  # accepted drafts plus the first rejected one of each step; later ones were not judged
    wait: int = 0  # steps without drafts before the next attempt
    next_wait: int = 1
    is_due: bool = True  # steps before an attempt, even though drafts do not seem worthwhile
    num_empty: int = 0  # consecutive attempts for which the drafter found nothing
    is_asked: bool = False  # for drafts none of which have been counted yet

    @property
    def rate(self) -> float:
        """The probability that a draft is accepted if all drafts before it are."""
        return self.num_accepted / self.num_judged


class Stakes(NamedTuple):
    """What drafts for this many requests can gain, and what they cost."""

    costs: DraftCosts
    can_pay: bool  # if all are accepted
    first_wait: int  # plain steps, a power of 4; the maximum
    longest_wait: int


class DraftLengths:
    """The number of drafts for each request, at most ``longest`` (0: none); with ``is_adaptive`` False, each gets the
    longest.

    Args:
        attempt_steps: the steps per draft that cannot be prepared while another runs: 2 if a step makes the draft and
            the next one verifies it (phase 11.1).
    """

    def __init__(
        self, longest: int, *, is_adaptive: bool = True, costs_of: CostsOf = a_tenth, attempt_steps: int = 1
    ) -> None:
        self.longest, self.is_adaptive, self.attempt_steps = longest, is_adaptive, attempt_steps
        self.costs_of = costs_of
        self.stakes: dict[tuple[int, int, int], Stakes] = {}
        self.stakes_of = costs_of  # the settings that they were made from
        self.known: WeakKeyDictionary[Request, Acceptance] = WeakKeyDictionary()
        self.num_steps = 0

    def wanted(self, decoding: Sequence[Request]) -> dict[Request, int]:
        """The numbers of drafts of the requests that want any; call it once per step, before drafts are granted."""
        if self.longest == 0:
            return {}
        asking = [request for request in decoding if request.params.use_speculative_decoding]
        return dict(zip(asking, self.next_lengths(asking), strict=True))

    def next_lengths(self, requests: Sequence[Request]) -> list[int]:
        """The numbers of drafts to try in the next step, which decodes these requests; call it once per step."""
        if not self.is_adaptive or not requests:
            return [self.longest] * len(requests)
        self.num_steps += 1
        certain = [min(max(r.num_certain_drafts - r.num_pending_tokens, 0), self.longest) for r in requests]
        stakes = self._stakes(len(requests), sum([request.num_tokens for request in requests]))
        if not stakes.can_pay:
            return certain
        known = [self.known.setdefault(request, Acceptance()) for request in requests]
        is_waiting = [self._waits(acceptance, stakes) for acceptance in known]
        if all(is_waiting):  # the usual case for unpredictable text, in which the host must not become slower
            return certain
        rates = [0.0 if waits else acceptance.rate for acceptance, waits in zip(known, is_waiting, strict=True)]
        lengths = best_lengths([rate if rate >= LEAST_RATE else 0.0 for rate in rates], self.longest, stakes.costs)
        for n, (acceptance, waits) in enumerate(zip(known, is_waiting, strict=True)):
            if waits:
                continue
            if lengths[n] > 0:
                acceptance.next_wait = acceptance.next_wait if acceptance.num_empty else 1
            elif acceptance.is_due:
                lengths[n] = 1
            else:
                self._back_off(acceptance, stakes)
            acceptance.is_due, acceptance.is_asked = False, lengths[n] > 0
        return [max(pair) for pair in zip(lengths, certain, strict=True)]

    def count(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Count the drafts of a step: at least one; the first ``num_accepted`` were accepted. Forced drafts say nothing
        about others.
        """
        num_drafts -= request.num_forced_drafts
        num_accepted = min(num_accepted, num_drafts)
        if not self.is_adaptive or num_drafts == 0:
            return
        known = self.known.setdefault(request, Acceptance())
        known.is_asked, known.num_empty = False, 0
        known.num_accepted = MEMORY * known.num_accepted + num_accepted
        known.num_judged = MEMORY * known.num_judged + min(num_accepted + 1, num_drafts)

    def _stakes(self, num_requests: int, context: int) -> Stakes:
        """Keyed by the number of requests and the power of two at or above ``context``, since each step looks them
        up."""
        if self.stakes_of is not self.costs_of:
            self.stakes, self.stakes_of = {}, self.costs_of
        key = num_requests, 1 << (context - 1).bit_length(), self.longest
        if key not in self.stakes:
            costs = self.costs_of(*key)
            cost = (self.attempt_steps * (costs.short - costs.plain) + costs.first) / costs.plain
            can_pay = any(best_lengths([1.0] * num_requests, self.longest, costs))
            waits = FIRST_WAIT_PER_COST * cost, max(LONGEST_WAIT_PER_COST * cost, LONGEST_WAIT)
            self.stakes[key] = Stakes(costs, can_pay, *map(_power_of_4, waits))
        return self.stakes[key]

    def _waits(self, known: Acceptance, stakes: Stakes) -> bool:
        """Whether a request has no drafts in this step, whatever their value."""
        if known.is_asked:  # in the previous step, and nothing was counted
            known.is_asked = False
            known.num_empty += 1
            if known.num_empty >= PATIENCE:
                self._back_off(known, stakes)
        if known.wait == 0:
            return False
        known.wait -= 1
        known.is_due = known.wait == 0
        return True

    def _back_off(self, known: Acceptance, stakes: Stakes) -> None:
        """Wait until a step whose number is a multiple of the wait."""
        wait = min(max(known.next_wait, stakes.first_wait), stakes.longest_wait)
        known.wait, known.next_wait = wait - self.num_steps % wait, 4 * wait


def draft_lengths(config: EngineConfig) -> DraftLengths:
    """From the settings; none if ``use_speculative_decoding`` is False."""
    longest = config.spec_length if config.use_speculative_decoding else 0
    return DraftLengths(longest, is_adaptive=config.is_on("adapt_spec_length"))


def _power_of_4(least: float) -> int:
    """The smallest power of 4 that is at least ``least`` and at least 1."""
    power = 1
    while power < least:
        power *= 4
    return power


def best_lengths(rates: Sequence[float], longest: int, costs: DraftCosts) -> list[int]:
    """The number of drafts for each of B requests, up to ``longest``, that gives the most tokens for the cost of the
    step.

    Args:
        rates: for each request, the probability that a draft is accepted if those before it are.
        costs: the costs for B requests.
    """
    plain, short, long, first, more = costs
    B = len(rates)
    chances: NDArray[np.float64] = np.array(rates)[:, None] ** np.arange(1, longest + 1)  # [B, longest]
    most, lengths = B / plain, [0] * B
    for depth in range(1, longest + 1) if first else (longest,):  # of the draft model's forwards
        flat = chances[:, :depth].ravel()
        order = (-flat).argsort(kind="stable")  # of a request's equally likely drafts, the earlier one first
        num_drafts = np.arange(1, B * depth + 1)
        total = np.interp(num_drafts, [B, B * longest], [short, long]) + first + (depth - 1) * more
        speeds = (B + flat[order].cumsum()) / total
        n = int(speeds.argmax())
        if speeds[n] > most:
            most, lengths = speeds[n], np.bincount(order[: n + 1] // depth, minlength=B).tolist()
    return lengths

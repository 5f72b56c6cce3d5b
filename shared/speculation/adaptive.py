"""How many drafts a request gets: as many as its measured acceptance is worth. Introduced in phase 11.

If a draft is accepted with probability a, a step with K drafts gives 1 + a + a^2 + ... + a^K tokens, and takes the time
of a plain step plus K times that of a draft. The length is the K with most tokens per time. It may be 0; then a single
draft is tried from time to time, at intervals that double up to ``LONGEST_WAIT``, since a text that could not be
guessed may turn into one that can. A drafter that repeatedly finds nothing is asked at such intervals too: a step that
asks for drafts cannot be prepared while the one before it runs.

Invariants: lengths depend on what was counted, never on time, so the same requests get the same lengths; a length
decides how fast tokens come, never which.
"""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

from shared.engine.request import Request

MEMORY = 0.9
"""What a step's evidence is worth a step later: the estimate is that of the last ten steps or so."""
DRAFT_COST = 0.1
"""The time of a draft, verified, in plain steps; on a CPU with few cores. A GPU verifies for less."""
LONGEST_WAIT = 32
PATIENCE = 4
"""Steps in a row in which a drafter may find nothing before it is asked less often."""


@dataclass
class Acceptance:
    """What is known about a request's drafts; at first that about two in three were accepted."""

    num_accepted: float = 2.0
    num_judged: float = 3.0  # accepted drafts, and the first rejected one of a step: those behind it were not judged
    wait: int = 0  # steps without drafts before the next attempt
    next_wait: int = 1
    num_empty: int = 0  # attempts in a row for which the drafter found nothing
    is_asked: bool = False  # for drafts of which none was counted yet

    @property
    def rate(self) -> float:
        """The probability that a draft behind accepted ones is accepted."""
        return self.num_accepted / self.num_judged


class DraftLengths:
    """The number of drafts of each request, at most ``longest``.

    Args:
        is_adaptive: False gives every request the longest, unless its parameters refuse drafts.
        draft_cost: the time of a draft, in plain steps.
    """

    def __init__(self, longest: int, *, is_adaptive: bool = True, draft_cost: float = DRAFT_COST) -> None:
        self.longest, self.is_adaptive, self.draft_cost = longest, is_adaptive, draft_cost
        self.known: WeakKeyDictionary[Request, Acceptance] = WeakKeyDictionary()

    def next_length(self, request: Request) -> int:
        """The number of drafts to try in the request's next step; call it once a step."""
        if not request.params.use_speculative_decoding:
            return 0
        if not self.is_adaptive:
            return self.longest
        known = self.known.setdefault(request, Acceptance())
        if known.is_asked:  # in the step before, and nothing was counted
            known.is_asked = False
            known.num_empty += 1
            if known.num_empty >= PATIENCE:
                self._back_off(known)
        if known.wait:
            known.wait -= 1
            return 0
        known.is_asked = True
        return max(1, best_length(known.rate, self.longest, self.draft_cost))

    def count(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Count the drafts of a step: at least one, of which the first ``num_accepted`` were accepted."""
        if not self.is_adaptive:
            return
        known = self.known.setdefault(request, Acceptance())
        known.is_asked, known.num_empty = False, 0
        known.num_accepted = MEMORY * known.num_accepted + num_accepted
        known.num_judged = MEMORY * known.num_judged + min(num_accepted + 1, num_drafts)
        if best_length(known.rate, self.longest, self.draft_cost) == 0:
            self._back_off(known)
        else:
            known.next_wait = 1

    def _back_off(self, known: Acceptance) -> None:
        known.wait = known.next_wait
        known.next_wait = min(2 * known.next_wait, LONGEST_WAIT)


def best_length(rate: float, longest: int, draft_cost: float) -> int:
    """The number of drafts, up to ``longest``, with most tokens per time, if each is accepted with chance ``rate``."""
    best, most_tokens_per_time, num_tokens, term = 0, 1.0, 1.0, 1.0
    for length in range(1, longest + 1):
        term *= rate
        num_tokens += term
        tokens_per_time = num_tokens / (1 + draft_cost * length)
        if tokens_per_time > most_tokens_per_time:
            best, most_tokens_per_time = length, tokens_per_time
    return best

"""Scheduling with drafts: tokens that are computed before it is known whether they are right. Introduced in phase 11.

A decoding request computes its newest token and, behind it, drafts; each of these tokens has a logit row. The token
sampled from row j is the output that follows the first j drafts, so the rows are valid up to the first whose token is
not the next draft: that token replaces the draft. A step thus gives a request one token more than it accepts drafts.

Drafts are granted last, from the token budget and the KV cache that the step leaves: they preempt no request, delay no
prompt, and never pass a request's maximum length.

Invariants: a step with drafts is committed before the next one is scheduled; after the commit, counts, block tables and
prefix tree are those of a run that never had the rejected drafts.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from shared.cache.pool import CachePoolProtocol
from shared.engine.config import EngineConfig
from shared.engine.request import Request, RequestStatus
from shared.engine.sampler import SampledTokens
from shared.scheduling.overlapped import OverlappedScheduler
from shared.scheduling.schedule import Schedule, Scheduled
from shared.speculation.adaptive import DraftLengths


class SpeculativeScheduler(OverlappedScheduler):
    """As :class:`OverlappedScheduler`, with drafts behind the tokens of decoding requests."""

    def __init__(self, config: EngineConfig, pool: CachePoolProtocol, max_seq_len: int) -> None:
        super().__init__(config, pool, max_seq_len)
        self.is_speculating = config.use_speculative_decoding
        self.lengths = DraftLengths(config.spec_length, is_adaptive=config.is_on("adapt_spec_length"))
        self.wanted: dict[Request, int] | None = None  # drafts, in the step that is planned; None: not asked yet
        self.had_drafts = False  # in the last step that was planned
        if self.is_speculating:
            self.num_drafts_by_position = [0] * config.spec_length
            self.num_accepted_by_position = [0] * config.spec_length

    @property
    def decodes_plainly(self) -> bool:
        """See :class:`OverlappedScheduler`; a step that follows one with drafts mostly has drafts too."""
        return not (self.is_speculating and self.had_drafts)

    def _wants_drafts(self, decoding: list[Request]) -> bool:
        """See :class:`OverlappedScheduler`."""
        if not self.is_speculating:
            return False
        wanted = self._wanted(decoding)
        self.wanted = wanted if any(wanted.values()) else None  # without drafts, nothing else asks for this step
        return self.wanted is not None

    def _wanted(self, decoding: Sequence[Request]) -> dict[Request, int]:
        """The drafts that requests are to have in the step that is planned; call it once, before tokens are granted."""
        asking = [request for request in decoding if request.params.use_speculative_decoding]
        return dict(zip(asking, self.lengths.next_lengths(asking), strict=True))

    def _plan(self, decoding: Sequence[Request], prompts: Sequence[Request], preempted: Iterable[str] = ()) -> Schedule:
        """As :class:`shared.scheduling.chunked.ChunkedScheduler` does, and drafts within the rest of the budget."""
        if not self.is_speculating:
            return super()._plan(decoding, prompts, preempted)
        wanted, self.wanted = self.wanted, None
        if wanted is None:
            wanted = self._wanted(decoding)
        schedule = super()._plan(decoding, prompts, preempted)
        budget, entries = self.config.max_num_batched_tokens - int(schedule.num_tokens.sum()), []
        for entry in schedule.decoding:
            entry = self._grant_drafts(entry, wanted.get(entry.request, 0), budget)
            budget -= entry.num_drafts
            entries.append(entry)
        ordered = _ordered(schedule, entries)
        self.had_drafts = ordered.has_drafts
        return ordered

    def _grant_drafts(self, entry: Scheduled, wanted: int, budget: int) -> Scheduled:
        """The entry of a decoding request with up to ``wanted`` drafts, for which KV cache is reserved."""
        request, end = entry.request, entry.start + entry.num_tokens
        count = min(wanted, budget, self._longest(request) - end - 1)  # a token is sampled behind the last draft
        while count > 0 and not self.pool.reserve(request, end + count):
            count -= 1
        return _resized(entry, max(count, 0))

    def commit(self, schedule: Schedule, sampled: SampledTokens) -> None:
        """See :class:`shared.scheduling.scheduler.Scheduler`; of the drafts only the accepted ones are counted."""
        if not schedule.has_drafts:
            super().commit(schedule, sampled)
            return
        entries, kept, tokens, first = [], [], list(sampled), 0
        self.verified = []
        for number, entry in enumerate(schedule):
            drawn = tokens[first : first + entry.num_logit_rows] if number not in sampled.errors else []
            first += len(drawn)
            request = entry.request
            is_awaited = request.status is RequestStatus.RUNNING and request.num_computed_tokens == entry.start
            if entry.num_drafts and drawn and is_awaited:
                num_accepted = num_equal([token_id for token_id, _ in drawn], request.draft_ids, request.ending_ids)
                self._count(request, entry.num_drafts, num_accepted)
                # exercise 11x3: keep what was accepted, and roll back the rest
                # hint: _resized gives the entry with another number of drafts, and the request's counts follow
                # hint: append the accepted drafts; each was a pending token
                # hint: super().commit appends the next token: leave it in `drawn`, and an `entry` of one logit row
                entry = _resized(entry, num_accepted)
                for token_id, logprobs in drawn[:num_accepted]:  # the KV cache has them already
                    request.append(token_id, logprobs)
                request.num_pending_tokens -= num_accepted
                entry, drawn = entry._replace(num_logit_rows=1), drawn[num_accepted : num_accepted + 1]
                # end exercise
            entries.append(entry)
            kept += drawn
        ids, all_logprobs = [token_id for token_id, _ in kept], [logprobs for _, logprobs in kept]
        sampled = replace(sampled, token_ids=ids, logprobs=all_logprobs)
        super().commit(replace(schedule, entries=tuple(entries)), sampled)
        for request, *_, num_drafts, _, _ in schedule:
            if num_drafts and request.status is RequestStatus.RUNNING:
                self.pool.shrink(request, request.num_computed_tokens)

    def _count(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Count the drafts of a request in a step, of which the first ``num_accepted`` were accepted."""
        num_rejected = num_drafts - num_accepted
        self.num_accepted_forced_drafts += max(num_accepted - (num_drafts - request.num_forced_drafts), 0)
        for counts in (self, request):
            counts.num_accepted_drafts += num_accepted
            counts.num_rejected_drafts += num_rejected
        for position in range(num_drafts):
            self.num_drafts_by_position[position] += 1
            self.num_accepted_by_position[position] += position < num_accepted
        self.verified.append((request.request_id, num_accepted, num_rejected))
        self.lengths.count(request, num_drafts, num_accepted)

    def drop_in_flight(self) -> None:
        """See :class:`shared.scheduling.scheduler.Scheduler`; what was reserved for drafts is given back."""
        super().drop_in_flight()
        self.wanted = None
        if self.is_speculating:
            for request in self.running.values():
                self.pool.shrink(request, request.num_tokens)


def settle(schedule: Schedule, pool: CachePoolProtocol) -> Schedule:
    """The schedule with the drafts that were proposed; gives back what was granted for more."""
    if all(len(entry.request.draft_ids) >= entry.num_drafts for entry in schedule):
        return schedule
    entries = []
    for entry in schedule.decoding:
        if len(entry.request.draft_ids) < entry.num_drafts:
            entry = _resized(entry, len(entry.request.draft_ids))
            pool.shrink(entry.request, entry.start + entry.num_tokens)
        entries.append(entry)
    return _ordered(schedule, entries)


def num_equal(drawn: Sequence[int], drafts: Sequence[int], end_ids: Collection[int] = ()) -> int:
    """The number of drafts, from the first, that equal the tokens drawn in their place.

    A draft in ``end_ids``, which may end the output, is not counted, nor are those behind it: the token is drawn, and
    has no successor.
    """
    # exercise 11x2: accept while they are equal
    # hint: drawn has one token more than there are drafts; drawn[0] stands in the place of drafts[0]
    # hint: stop at the first that differs: what was drawn behind it followed a wrong token
    # hint: stop before a token of end_ids too
    count = 0
    while count < len(drafts) and drawn[count] == drafts[count] and drawn[count] not in end_ids:
        count += 1
    return count
    # end exercise


def _resized(entry: Scheduled, num_drafts: int) -> Scheduled:
    """The entry with another number of drafts; the request's counts follow."""
    change = num_drafts - entry.num_drafts
    if change == 0:
        return entry
    entry.request.num_scheduled_tokens += change
    entry.request.num_pending_tokens += change
    request, start, num_tokens, _, num_rows, num_prompt_logprobs = entry
    return Scheduled(request, start, num_tokens + change, num_drafts, num_rows + change, num_prompt_logprobs)


def _ordered(schedule: Schedule, decoding: Iterable[Scheduled]) -> Schedule:
    """The schedule with these decoding entries, those of one token first: their attention has its own kernel."""
    entries = sorted(decoding, key=lambda entry: entry.num_drafts > 0)
    return replace(schedule, entries=(*entries, *schedule.prompts))

"""Drafts in a schedule: granted last, verified by the step, then accepted or given back. Introduced in phase 11.

A decoding request computes its newest token and, after it, drafts; each of these tokens has a logit row. The token
sampled from row j is the output that follows the first j drafts, so the rows are valid up to the first whose token is
not the next draft: that token replaces the draft. A step thus gives a request one token more than the drafts that it
accepts.

Drafts are granted from the token budget and the KV cache that the step leaves: they preempt no request, delay no
prompt, and never pass a request's maximum length.

Invariant: after the commit, counts, block tables and prefix tree are as if the rejected drafts had never existed.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shared.cache.pool.interface import CachePoolProtocol
from shared.engine.request import Request, RequestStatus
from shared.engine.sampling.sampler import SampledTokens
from shared.scheduling.schedule import Schedule, Scheduled
from shared.scheduling.scheduler import Scheduler
from shared.speculation.adaptive import DraftLengths


def grant_drafts(scheduler: Scheduler, schedule: Schedule, wanted: Mapping[Request, int]) -> Schedule:
    """The schedule with up to ``wanted`` drafts for each request, within the remaining budget and KV cache."""
    if not any(wanted.values()):
        return schedule
    budget, entries = scheduler.config.max_num_batched_tokens - int(schedule.num_tokens.sum()), []
    for entry in schedule.decoding:
        request, end = entry.request, entry.start + entry.num_tokens
        most = scheduler.longest(request) - end - 1  # a token is sampled after the last draft
        count = min(wanted.get(request, 0), budget, most)
        while count > 0 and not scheduler.pool.reserve(request, end + count):
            count -= 1
        entries.append(_resized(entry, max(count, 0)))
        budget -= entries[-1].num_drafts
    return _ordered(schedule, entries)


def settle(schedule: Schedule, pool: CachePoolProtocol) -> Schedule:
    """The schedule with the drafts that were proposed; gives back the unused grants."""
    if not schedule.has_drafts or all(len(entry.request.draft_ids) >= entry.num_drafts for entry in schedule):
        return schedule
    entries = []
    for entry in schedule.decoding:
        if len(entry.request.draft_ids) < entry.num_drafts:
            entry = _resized(entry, len(entry.request.draft_ids))
            pool.shrink(entry.request, entry.start + entry.num_tokens)
        entries.append(entry)
    return _ordered(schedule, entries)


def commit_drafts(scheduler: Scheduler, lengths: DraftLengths, schedule: Schedule, sampled: SampledTokens) -> None:
    """Like :meth:`Scheduler.commit`, for a step with drafts; only accepted drafts are counted as tokens.

    ``lengths`` records how many of each request's drafts were accepted.
    """
    entries, kept, tokens, first = [], [], list(sampled), 0
    scheduler.verified = []
    for number, entry in enumerate(schedule):
        results = tokens[first : first + entry.num_logit_rows] if number not in sampled.errors else []
        first += len(results)
        request = entry.request
        is_awaited = request.status is RequestStatus.RUNNING and request.num_computed_tokens == entry.start
        if entry.num_drafts and results and is_awaited:
            num_accepted = num_equal([token_id for token_id, _ in results], request.draft_ids, request.ending_ids)
            _count(scheduler, request, entry.num_drafts, num_accepted)
            lengths.count(request, entry.num_drafts, num_accepted)
            # exercise 11x3: keep what was accepted, and roll back the rest
            # hint: _resized gives the entry with another number of drafts, and the request's counts follow
            # hint: append the accepted drafts; each was a pending token
            # hint: Scheduler.commit appends the next token: leave it in `results`, and an `entry` of one logit row
            entry = _resized(entry, num_accepted)
            for token_id, logprobs in results[:num_accepted]:  # the KV cache already holds them
                request.append(token_id, logprobs)
            request.num_pending_tokens -= num_accepted
            entry, results = entry._replace(num_logit_rows=1), results[num_accepted : num_accepted + 1]
            # end exercise
        entries.append(entry)
        kept += results
    ids, all_logprobs = [token_id for token_id, _ in kept], [logprobs for _, logprobs in kept]
    sampled = replace(sampled, token_ids=ids, logprobs=all_logprobs)
    Scheduler.commit(scheduler, replace(schedule, entries=tuple(entries)), sampled)
    for request, *_, num_drafts, _, _ in schedule:
        if num_drafts and request.status is RequestStatus.RUNNING:
            scheduler.pool.shrink(request, request.num_computed_tokens)


def num_equal(sampled: Sequence[int], drafts: Sequence[int], end_ids: Collection[int] = ()) -> int:
    """The number of drafts, from the first, that equal the tokens sampled at their positions.

    A draft in ``end_ids``, which may end the output, is not counted, nor are later ones: the sampled token ends the
    output.
    """
    # exercise 11x2: accept while they are equal
    # hint: sampled has one token more than there are drafts; sampled[0] was sampled for the position of drafts[0]
    # hint: stop at the first that differs: what was sampled after it followed a wrong token
    # hint: stop before a token of end_ids too
    count = 0
    while count < len(drafts) and sampled[count] == drafts[count] and sampled[count] not in end_ids:
        count += 1
    return count
    # end exercise


def draft_stats(scheduler: Scheduler) -> dict[str, Any]:
    """Counts of drafts, for an engine's ``stats``."""
    return {
        "step costs": scheduler.step_costs or "none",
        "drafts accepted (tokens)": scheduler.num_accepted_drafts,
        "drafts rejected (tokens)": scheduler.num_rejected_drafts,
        **{f"accepted at position {n}": count for n, count in enumerate(scheduler.num_accepted_by_position)},
    }


def give_back(scheduler: Scheduler) -> None:
    """Give back what was reserved for the drafts of a dropped step."""
    for request in scheduler.running.values():
        scheduler.pool.shrink(request, request.num_tokens)


def _count(scheduler: Scheduler, request: Request, num_drafts: int, num_accepted: int) -> None:
    """Count a request's drafts in a step; the first ``num_accepted`` were accepted."""
    num_rejected, num_own = num_drafts - num_accepted, num_drafts - request.num_forced_drafts
    scheduler.num_accepted_forced_drafts += max(num_accepted - num_own, 0)
    for counts in (scheduler, request):
        counts.num_accepted_drafts += num_accepted
        counts.num_rejected_drafts += num_rejected
    for position in range(num_drafts):
        scheduler.num_drafts_by_position[position] += 1
        scheduler.num_accepted_by_position[position] += position < num_accepted
    scheduler.verified.append((request.request_id, num_accepted, num_rejected))


def _resized(entry: Scheduled, num_drafts: int) -> Scheduled:
    """The entry with a different number of drafts; the request's counts follow."""
    change = num_drafts - entry.num_drafts
    if change == 0:
        return entry
    entry.request.num_scheduled_tokens += change
    entry.request.num_pending_tokens += change
    request, start, num_tokens, _, num_rows, num_prompt_logprobs = entry
    return Scheduled(request, start, num_tokens + change, num_drafts, num_rows + change, num_prompt_logprobs)


def _ordered(schedule: Schedule, decoding: Iterable[Scheduled]) -> Schedule:
    """The schedule with these decoding entries, those of a single token first: their attention has its own kernel."""
    entries = sorted(decoding, key=lambda entry: entry.num_drafts > 0)
    return replace(schedule, entries=(*entries, *schedule.prompts))

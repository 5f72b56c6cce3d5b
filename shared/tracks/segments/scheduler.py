"""Scheduling for requests made of segments: missing segments are computed first. Introduced in phase 9.1.

An internal request computes each segment as a prompt, in the same steps as other requests; its single token is dropped.
The missing segments of the first waiting request that lacks any are queued directly before it; this request and all
later ones wait. So requests are admitted in order of arrival, and the segments of one never displace those of an
earlier request. Segments registered without a request join the end of the queue.

Invariants: a request is admitted only while all its segments are resident; a segment is computed once, however many
requests wait for it; if computing it fails, the requests that wait for it fail too.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from shared.cache.pool.interface import CachePoolProtocol
from shared.engine.config import EngineConfig
from shared.engine.request import Request, RequestStatus
from shared.engine.sampling.sampler import SampledTokens
from shared.sampling.params import SamplingParams
from shared.scheduling.admission import admit
from shared.scheduling.chunks import prefill_of
from shared.scheduling.growth import grow, known_tokens
from shared.scheduling.next_tokens import commit_next_tokens, grant_next_tokens, only_decoding
from shared.scheduling.overlapped import has_block_for_each, must_know_ends
from shared.scheduling.policies import share
from shared.scheduling.prefix import count_prefix_hits, prefix_stats
from shared.scheduling.schedule import Schedule
from shared.scheduling.scheduler import Scheduler
from shared.tracks.segments.registry import Segment, SegmentRegistry

ONE_TOKEN = SamplingParams(temperature=0.0, max_new_tokens=1)  # the minimum; nothing reads the token


class SegmentScheduler(Scheduler):
    """Schedules with at most one step in flight, and the segments of ``registry``."""

    def __init__(
        self, config: EngineConfig, pool: CachePoolProtocol, max_seq_len: int, registry: SegmentRegistry
    ) -> None:
        super().__init__(config, pool, max_seq_len)
        self.prefill = prefill_of(config)
        self.registry = registry

    def schedule(self) -> Schedule:
        """Empty if the step in flight must be finished first."""
        for segment in self.registry.wanted:
            self.compute(segment)
        self.registry.wanted.clear()
        self.put_missing_segments_first()
        if has_block_for_each(self):
            if decoding := only_decoding(self, self.running.values()):
                return grant_next_tokens(self, decoding)
        elif must_know_ends(self):
            return Schedule(self.num_steps)
        self.num_steps += 1
        decoding = self.decoding()
        preempted = grow(self, decoding)
        ready = self.candidates()
        admitted = [] if preempted else admit(self, ready, known_tokens, self.pool.watermark_tokens)
        count_prefix_hits(self, self.looked_up(admitted))
        if preempted or admitted:
            decoding = self.decoding()
        decoding, prompts = share(self, decoding, self.prefill.prompts(self.running.values()))
        entries = self.prefill.fill(decoding, prompts)
        return Schedule(self.num_steps, entries, len(decoding), tuple(preempted))

    def stats(self) -> dict[str, Any]:
        return prefix_stats(self)

    def commit(self, schedule: Schedule, sampled: SampledTokens) -> None:
        """Requests that computed a segment retire."""
        if schedule.is_decode and not sampled.errors:
            commit_next_tokens(self, schedule, sampled)
        else:
            super().commit(schedule, sampled)
        for request, segment in list(self.registry.computing.items()):
            if segment.is_resident:
                self.retire(request, RequestStatus.FINISHED)

    def has_work(self) -> bool:
        return bool(self.registry.wanted) or super().has_work()

    def put_missing_segments_first(self) -> None:
        """Queue the missing segments of the first waiting request that lacks any, directly before it."""
        # exercise 09.1x4: the segments of the first request that lacks any, directly before it
        # hint: registry.missing names the missing segments of a request; find the first waiting request that has any
        # hint: touch its resident segments (registry.contexts), so that computing the others does not evict it
        # hint: self.compute returns the request that computes a segment, which may be waiting already, or running
        # hint: self.waiting is an OrderedDict: move to its end, in this order, the requests that compute and are
        # hint: waiting, then the request, then those after it (move_to_end); those before it keep their order
        queue = list(self.waiting.values())
        for place, request in enumerate(queue):
            missing = self.registry.missing(request)
            if missing:
                self.registry.touch(self.registry.contexts[request])
                computing = [self.compute(segment) for segment in missing]
                for one in (*computing, *(other for other in queue[place:] if other not in computing)):
                    if one.request_id in self.waiting:
                        self.waiting.move_to_end(one.request_id)
                break
        # end exercise

    def candidates(self) -> Iterator[Request]:
        """The requests before the first one that lacks segments, each checked when it is reached."""
        for request in list(self.waiting.values()):
            if self.registry.missing(request):
                return
            if not self.pool.must_wait(request):
                yield request

    def looked_up(self, requests: Iterable[Request]) -> list[Request]:
        """The requests that are looked up in the prefix tree: those without segments, unless they compute one."""
        registry = self.registry
        return [one for one in requests if one not in registry.contexts and one not in registry.computing]

    def compute(self, segment: Segment) -> Request:
        """The request that computes a segment; a new one at the end of the queue if there is none."""
        for request, computed in self.registry.computing.items():
            if computed is segment:
                return request
        name = f"segment {segment.segment_id}"
        while name in self:  # since a client may have used this id for a request
            name += "+"
        request = Request(name, list(segment.token_ids), ONE_TOKEN, 0)
        self.registry.computing[request] = segment
        self.add(request)
        return request

    def retire(self, request: Request, status: RequestStatus) -> None:
        super().retire(request, status)
        segment = self.registry.computing.pop(request, None)
        if segment is not None and status is RequestStatus.FAILED:
            segment.error = request.error
            for waiting in list(self.waiting.values()):
                if segment in self.registry.contexts.get(waiting, ()):
                    waiting.error = request.error
                    super().retire(waiting, status)

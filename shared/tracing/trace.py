"""A recorded run as data: steps with their times, requests with their outcomes. Introduced in phase 4.

All pages, counters and files of a run are derived from a trace. A step includes the engine's whole
:class:`~shared.engine.record.StepRecord`, so fields that a later phase adds appear in the trace and in both files
without a change here. Invariants: steps are numbered from 0 without gaps; a request has exactly one cell in each step
from its arrival to its end; apart from times, equal runs give equal traces.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import groupby

from shared.engine.memory_map import MemoryMap
from shared.engine.record import StepRecord
from shared.grammar.progress import Position


class CellKind(StrEnum):
    """What a step did for a request. QUEUE: nothing, the request is waiting for its prefill. STALL: nothing, the
    request is running but was not in the step. PENDING: nothing, but its token from the previous step arrived.
    PREEMPTED: nothing, its KV cache was freed. RECOMPUTE: its prompt and outputs were recomputed. FAILED: the step ran
    the request, which raised.
    """

    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE = "decode"
    STALL = "stall"
    PENDING = "pending"
    PREEMPTED = "preempted"
    RECOMPUTE = "recompute"
    FAILED = "failed"


class Outcome(StrEnum):
    """The outcome of a request; OPEN if the recording ended first."""

    OPEN = "open"
    FINISHED = "finished"
    FAILED = "failed"
    ABORTED = "aborted"


@dataclass(frozen=True)
class Cell:
    """One request in one step, which computed ``num_tokens`` of its tokens, for a prompt, from ``start`` on.

    Drafts are not among these tokens.
    """

    step: int
    kind: CellKind
    num_tokens: int = 0
    start: int = 0
    num_accepted_drafts: int = 0
    num_rejected_drafts: int = 0

    @property
    def num_drafts(self) -> int:
        return self.num_accepted_drafts + self.num_rejected_drafts


@dataclass(frozen=True)
class TracedToken:
    """An output token, the step that sampled it, the text that it released, and its grammar position, if any."""

    step: int
    token_id: int
    text: str
    position: Position | None = None


@dataclass(frozen=True)
class TracedRequest:
    """One request. Times are nanoseconds of the trace's clock, which starts at 0."""

    request_id: str
    num_prompt_tokens: int
    max_new_tokens: int
    arrival_step: int  # the first step that could have run it
    arrived_ns: int
    prompt: str | None = None  # its text, if given as text
    num_cached_tokens: int = 0  # tokens of its prompt that were in the KV cache when it was first admitted
    tokens: tuple[TracedToken, ...] = ()
    outcome: Outcome = Outcome.OPEN
    finish_reason: str | None = None
    error: str | None = None
    end_step: int | None = None  # the first step after its last
    ended_ns: int | None = None


@dataclass(frozen=True)
class Span:
    """A named part of the host's time, or of the GPU's."""

    name: str
    started_ns: int
    ended_ns: int


@dataclass(frozen=True)
class TracedStep:
    """A step's record, its start and end times, the KV cache after it, and the activity that it caused."""

    record: StepRecord
    started_ns: int
    ended_ns: int
    memory: MemoryMap | None = None
    host: tuple[Span, ...] = ()  # the parts of the step
    gpu: tuple[Span, ...] = ()  # when the GPU ran the step's launches, possibly after the step; none on a CPU
    ranks: tuple[tuple[Span, ...], ...] = ()  # each other rank's forwards, as its host saw them (phase 12.1)

    @property
    def num_served(self) -> int:
        """Number of requests in the step's forwards."""
        return len(self.record.prefilled) + len(self.record.decoded) + len(self.record.failed)

    @property
    def has_work(self) -> bool:
        """Whether any request was served, waits or runs."""
        return bool(self.num_served or self.record.num_waiting or self.record.num_running)


@dataclass(frozen=True)
class Totals:
    """Summary statistics of a run. Queue waits include only the requests that were prefilled; None if there are
    none."""

    num_steps: int  # steps with work
    seconds: float  # of the steps with work
    num_tokens: int  # generated
    batch_utilisation: float  # served requests over max_batch_size, averaged over steps with work
    mean_queue_steps: float | None
    longest_queue_steps: int | None
    mean_queue_seconds: float | None
    most_served: int = 0  # requests in one step
    written_share: float | None = None  # share of the held KV cache tokens, over all steps; None if none was held
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0  # after preemptions
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens that were found in the KV cache
    num_accepted_drafts: int = 0
    num_drafts: int = 0

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Trace:
    """A run: ``title`` distinguishes it from other traces on the page, ``settings`` are shown with it."""

    title: str
    max_batch_size: int
    steps: tuple[TracedStep, ...]
    requests: tuple[TracedRequest, ...]  # in order of arrival
    settings: Mapping[str, str | int | float | None] = field(default_factory=dict)

    def cells(self, request: TracedRequest) -> tuple[Cell, ...]:
        """One cell for each step from the request's arrival to its end."""
        served = self._served.get(request.request_id, {})
        given = {token.step for token in request.tokens}
        first_token = min(given, default=len(self.steps))
        idle = CellKind.QUEUE
        cells = []
        for step in self._span(request):
            cell = served.get(step)
            if request.request_id in self.steps[step].record.preempted:
                idle = CellKind.PREEMPTED
            if cell is not None:
                idle = CellKind.STALL
                if cell.kind is CellKind.PREFILL and step > first_token:
                    cell = replace(cell, kind=CellKind.RECOMPUTE)
            cells.append(cell or Cell(step, CellKind.PENDING if step in given else idle))
        return tuple(cells)

    def runs(self, request: TracedRequest) -> list[tuple[CellKind, int, int]]:
        """The runs of consecutive cells of one kind: the kind, its first step, and the step after its last."""
        groups = [(kind, [*cells]) for kind, cells in groupby(self.cells(request), key=lambda cell: cell.kind)]
        return [(kind, cells[0].step, cells[-1].step + 1) for kind, cells in groups]

    def chunks(self, request: TracedRequest) -> list[tuple[int, int, int]]:
        """The parts in which its prompt (or, after a preemption, its prompt and outputs) was computed, as (step, first
        token, tokens)."""
        kinds = CellKind.PREFILL, CellKind.RECOMPUTE
        return [(cell.step, cell.start, cell.num_tokens) for cell in self.cells(request) if cell.kind in kinds]

    def preemptions(self, request: TracedRequest) -> list[int]:
        """The steps in which it was preempted."""
        return [step for step in self._span(request) if request.request_id in self.steps[step].record.preempted]

    @cached_property
    def totals(self) -> Totals:
        """The run's summary statistics."""
        busy = [step for step in self.steps if step.has_work]
        waits = []
        for request in self.requests:
            served = self._served.get(request.request_id, {})
            first = next((step for step in self._span(request) if step in served), None)
            if first is not None:
                waits.append((first - request.arrival_step, self.steps[first].started_ns - request.arrived_ns))
        num_slots = len(busy) * self.max_batch_size
        maps = [step.memory for step in self.steps if step.memory is not None]
        held = sum(memory.num_held * memory.block_tokens for memory in maps)
        return Totals(
            num_steps=len(busy),
            seconds=sum(step.ended_ns - step.started_ns for step in busy) / 1e9,
            num_tokens=sum(len(request.tokens) for request in self.requests),
            batch_utilisation=sum(step.num_served for step in busy) / num_slots if num_slots else 0.0,
            mean_queue_steps=sum(steps for steps, _ in waits) / len(waits) if waits else None,
            longest_queue_steps=max(steps for steps, _ in waits) if waits else None,
            mean_queue_seconds=sum(ns for _, ns in waits) / len(waits) / 1e9 if waits else None,
            most_served=max((step.num_served for step in busy), default=0),
            written_share=sum(memory.num_written for memory in maps) / held if held else None,
            num_preemptions=sum(len(step.record.preempted) for step in self.steps),
            num_recomputed_tokens=sum(
                cell.num_tokens
                for request in self.requests
                for cell in self.cells(request)
                if cell.kind is CellKind.RECOMPUTE
            ),
            num_prompt_tokens=sum(request.num_prompt_tokens for request in self.requests),
            num_cached_tokens=sum(request.num_cached_tokens for request in self.requests),
            num_accepted_drafts=sum(accepted for step in self.steps for _, accepted, _ in step.record.verified),
            num_drafts=sum(sum(counts) for step in self.steps for _, *counts in step.record.verified),
        )

    def _span(self, request: TracedRequest) -> range:
        """The steps from its arrival to its end; outside this range its id may belong to another request."""
        return range(request.arrival_step, len(self.steps) if request.end_step is None else request.end_step)

    @cached_property
    def _served(self) -> dict[str, dict[int, Cell]]:
        """For each served id, the cells by step."""
        served: dict[str, dict[int, Cell]] = {}
        for index, step in enumerate(self.steps):
            for (request_id, num_tokens), start in zip(step.record.prefilled, step.record.prefill_starts, strict=True):
                served.setdefault(request_id, {})[index] = Cell(index, CellKind.PREFILL, num_tokens, start)
            drafts = {request_id: counts for request_id, *counts in step.record.verified}
            for request_id in step.record.decoded:
                accepted, rejected = drafts.get(request_id, (0, 0))
                cell = Cell(index, CellKind.DECODE, 1, 0, accepted, rejected)
                served.setdefault(request_id, {})[index] = cell
            for request_id in step.record.failed:
                served.setdefault(request_id, {})[index] = Cell(index, CellKind.FAILED)
        return served

"""Reads the state of an engine between two lines of its step, as JSON values. Introduced in phase 4.

Everything is read from the parts themselves: queues, requests, the pool's blocks and its prefix tree, and the local
variables of running functions. What no part keeps (the batch, the steps in flight, the sampled tokens) is taken from
the results of the calls that make it. :mod:`shared.tracing.steps.recording` describes the values.

Invariant: reading changes nothing.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from types import FrameType
from typing import Any

import numpy as np

from shared.cache.layout.paged import PagedLayout
from shared.cache.pool.prefix_tree import Node
from shared.engine.batch import Batch
from shared.engine.request import Request, RequestStatus
from shared.engine.sampling.sampler import SampledTokens, SamplerOutput
from shared.grammar.constraint import Constraint
from shared.grammar.progress import Progress
from shared.scheduling.schedule import Schedule, Scheduled
from shared.tracing.recorder import SEGMENT
from shared.tracing.steps.patches import State
from shared.tracing.steps.variables import variables

MOST_EXAMPLES = 6
SEGMENT_DIGITS = 4
"""How many characters are shown of the hash that names a request that computes a segment (phase 9.1)."""


class EngineState:
    """Reads ``engine``, from the start of a recording on."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.first_step = engine.scheduler.num_steps + 1
        self.requests: dict[str, Request] = {}  # in order of arrival
        self.texts: dict[str, str] = {}  # released
        self.reasons: dict[str, str] = {}
        self.ready: tuple[list[Any], int] = [], 0  # the outputs of the engine that have been read, and how many
        self.nodes: dict[Node, int] = {}
        # the number of outputs read, and the values at that point
        self.grammars: dict[str, tuple[Progress, int, State]] = {}
        self.launched: dict[int, tuple[Any, Schedule]] = {}  # launched and not yet awaited
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self.schedule: Schedule | list[Scheduled] = []
        self.batch: Batch | None = None
        self.sampled: dict[str, list[int]] = {}
        self.old_drafts = {request: request.draft_ids for request in self.requests.values()}
        self.verified = self.engine.scheduler.verified

    def launch(self, frame: FrameType, result: Any) -> None:
        """``Runner.forward`` has returned."""
        if frame.f_locals["self"] is self.engine.runner and isinstance(self.schedule, Schedule) and result is not None:
            self.launched[id(result)] = result, self.schedule

    def sample(self, frame: FrameType, result: Any) -> None:
        """``Runner.sample`` has returned, and its result is awaited."""
        launched = self.launched.pop(id(frame.f_locals["launched"]), None)
        if launched is not None and result is not None:
            self.launched[id(result)] = result, launched[1]

    def wait(self, frame: FrameType, result: Any) -> None:
        """``SamplerOutput.wait`` has returned."""
        output = frame.f_locals["self"]
        launched = self.launched.pop(id(output), None)
        if launched is not None and isinstance(output, SamplerOutput) and isinstance(result, SampledTokens):
            first = 0
            for number, entry in enumerate(launched[1]):
                if number not in result.errors and entry.num_logit_rows:
                    rows = result.token_ids[first : first + entry.num_logit_rows]
                    self.sampled[name_of(entry.request)] = rows
                    first += entry.num_logit_rows

    def make_batch(self, frame: FrameType, result: Any) -> None:
        """``Batch.of`` has returned."""
        if isinstance(result, Batch):
            self.batch = result

    def __call__(self, frames: Sequence[FrameType]) -> State:
        """The state now."""
        scheduler = self.engine.scheduler
        for request in (*scheduler.waiting.values(), *scheduler.running.values()):
            self.requests[name_of(request)] = request  # including requests that an engine adds by itself
        self._find_schedule(frames)
        self._read_outputs()
        state: State = {
            "queues": {
                "waiting": [name_of(request) for request in scheduler.waiting.values()],
                "running": [name_of(request) for request in scheduler.running.values()],
                "ending": [name_of(request) for request in scheduler.ending],
                "finished": [name for name, request in self.requests.items() if _is_final(request)],
            },
            "requests": {name: self._request(request) for name, request in self.requests.items()},
            "pool": self._pool(),
            "tree": self._tree(),
            "schedule": self._schedule(),
            "batch": self._batch(),
            "in_flight": [self._in_flight(schedule) for _, schedule in self.launched.values()],
            "drafts": self._drafts(),
            "sampled": dict(self.sampled),
            "grammar": self._grammars(),
            "kept": {name: {"tokens": count, "layers": kept} for name, count, kept in scheduler.compressions},
            "variables": {str(depth): variables(frame) for depth, frame in enumerate(frames)},
        }
        return {name: panel for name, panel in state.items() if panel or name in ("queues", "requests", "pool")}

    def _find_schedule(self, frames: Sequence[FrameType]) -> None:
        """The schedule of the innermost function that has one, or the entries that it is making."""
        for frame in reversed(frames):
            for value in frame.f_locals.values():
                if isinstance(value, Schedule):
                    self.schedule = value
                    return
                if isinstance(value, list | tuple) and value and all(isinstance(each, Scheduled) for each in value):
                    self.schedule = list(value)
                    return

    def _read_outputs(self) -> None:
        """Append what was released since the last call."""
        outputs, count = self.ready
        if outputs is not self.engine.output_processor.ready:
            outputs, count = self.engine.output_processor.ready, 0
        for output in outputs[count:]:
            self.texts[output.request_id] = self.texts.get(output.request_id, "") + output.text
            if output.finish_reason is not None:
                self.reasons[output.request_id] = str(output.finish_reason)
        self.ready = outputs, len(outputs)

    def _request(self, request: Request) -> State:
        pool, name = _target(self.engine.scheduler.pool), name_of(request)
        found: State = {
            "status": str(request.status),
            "computed": request.num_computed_tokens,
            "scheduled": request.num_scheduled_tokens,
            "pending": request.num_pending_tokens,
            "known": request.num_tokens,
            "outputs": {str(number): token_id for number, token_id in enumerate(request.output_ids)},
            "text": self.texts.get(name, ""),
        }
        if request.num_cached_tokens:
            found["cached"] = request.num_cached_tokens
        if name in self.reasons:
            found["reason"] = self.reasons[name]
        row = (pool.rows if hasattr(pool, "rows") else pool.regions).get(request)
        if row is not None:
            found |= {"row": row, "blocks": pool.holdings()[1].get(request, []), "written": pool.length(request)}
        return found

    def _pool(self) -> State:
        pool = _target(self.engine.scheduler.pool)
        size, holdings = pool.holdings()
        owners: dict[int, list[str]] = {}
        for request, table in holdings.items():
            for block in table:
                owners.setdefault(block, []).append(name_of(request))
        blocks: State = {str(block): [names, len(names)] for block, names in owners.items()}
        if hasattr(pool, "allocator"):
            counts = pool.allocator.ref_counts
            kept = {block for node in self._known_nodes() for block in node.blocks.tolist()}
            blocks = {
                str(block): [owners.get(block, []), int(counts[block]), *([1] if block in kept else [])]
                for block in np.flatnonzero(counts).tolist()
            }
        return {
            "unit": "block" if hasattr(pool, "allocator") else "region",
            "block_size": size,
            "num_blocks": pool.capacity_tokens // size,
            "blocks": blocks,
        }

    def _known_nodes(self) -> Iterable[Node]:
        """The nodes of the prefix tree without its root, numbered as they are first seen."""
        extension: Any = getattr(_target(self.engine.scheduler.pool), "extension", None)
        tree = getattr(getattr(extension, "sharing", extension), "tree", None)  # in a side track, this holds the tree's
        if tree is None:
            return []
        self.nodes.setdefault(tree.root, 0)
        nodes, found = [tree.root], []
        while nodes:
            children = list(nodes.pop().children.values())
            for child in children:
                self.nodes.setdefault(child, len(self.nodes))
            nodes += children
            found += children
        return found

    def _tree(self) -> State:
        return {
            str(self.nodes[node]): {
                "parent": self.nodes[node.parent],
                "tokens": np.frombuffer(node.tokens, np.int32).tolist(),
                "blocks": node.blocks.tolist(),
                "users": node.num_users,
            }
            for node in self._known_nodes()
            if node.parent is not None
        }

    def _schedule(self) -> State:
        if not self.schedule:
            return {}
        schedule = self.schedule
        step = schedule.step if isinstance(schedule, Schedule) else self.engine.scheduler.num_steps
        items = []
        for number, entry in enumerate(schedule):
            request, start, num_tokens, num_drafts, num_rows, _ = entry
            is_decode = start >= request.num_prompt_tokens and num_tokens - num_drafts == 1
            if isinstance(schedule, Schedule):
                is_decode = number < schedule.num_decoding
            item = {"id": name_of(request), "start": start, "tokens": num_tokens, "rows": num_rows}
            item["kind"] = "decode" if is_decode else "prefill"
            items.append(item | ({"drafts": num_drafts} if num_drafts else {}))
        return {"step": step - self.first_step, "items": items}

    def _batch(self) -> State:
        if self.batch is None:
            return {}
        batch, layout = self.batch, self.batch.layout
        arrays = {
            "num_new": batch.num_new_tokens,
            "token_ids": batch.token_ids,
            "positions": batch.positions,
            "slots": layout.slot_mapping,
            "pending": batch.pending,
            "logit_rows": batch.logit_rows,
            "num_cached": layout.num_cached,
            "lengths": layout.lengths,
        }
        found: State = {name: values.tolist() for name, values in arrays.items()}
        found = {
            "ids": [short(each) for each in batch.request_ids],
            **{name: values for name, values in found.items() if values},
        }
        if isinstance(layout, PagedLayout):
            tables = layout.tables.tolist()
            found["tables"] = [tables[first:last] for first, last in pairwise(layout.table_starts.tolist())]
            if len(layout.copies):
                found["copies"] = layout.copies.tolist()
            plans = getattr(layout.extra, "plans", None)
            for name in ("decode", "prefill"):
                # of the first window; usually there is only one
                for plan in list(getattr(plans, name, {}).values())[:1]:
                    columns = (plan.request_indices, plan.query_tile_indices, plan.kv_tile_indices)
                    items = np.stack(columns)[:, : int(plan.num_items[0])].T.tolist()
                    found.setdefault("plan", {})[name] = {"split": int(plan.split_size[0]), "items": items}
        return found

    def _in_flight(self, schedule: Schedule) -> State:
        return {"step": schedule.step - self.first_step, "ids": [name_of(entry.request) for entry in schedule]}

    def _drafts(self) -> State:
        found: State = {}
        for entry in self.schedule:
            request = entry.request
            drafts: State = {"granted": entry.num_drafts} if entry.num_drafts else {}
            if drafts and request.draft_ids is not self.old_drafts.get(request):
                drafts["ids"] = [token_id for token_id in request.draft_ids if token_id >= 0]  # known on the host
                if request.num_forced_drafts:
                    drafts["forced"] = request.num_forced_drafts
            if self.verified is not self.engine.scheduler.verified:
                for name, accepted, rejected in self.engine.scheduler.verified:
                    if name == request.request_id and drafts:
                        drafts |= {"accepted": accepted, "rejected": rejected}
            if drafts:
                found[name_of(request)] = drafts
        return found

    def _grammars(self) -> State:
        found: State = {}
        for name, request in self.requests.items():
            if isinstance(request.constraint, Constraint):
                walk, count, values = self.grammars.get(name) or (Progress(request.constraint.fsm), -1, {})
                if count != len(request.output_ids):
                    for token_id in request.output_ids[max(count, 0) :]:
                        walk.read(token_id)
                    values = _position(walk)
                    self.grammars[name] = walk, len(request.output_ids), values
                found |= {name: values} if values else {}
        return found


def name_of(request: Request) -> str:
    """The name of a request in a recording."""
    return short(request.request_id)


def short(request_id: str) -> str:
    """An id; for a segment's request, with only the first digits of its hash."""
    if not request_id.startswith(SEGMENT):
        return request_id
    digits = request_id.removeprefix(SEGMENT).rstrip("+")
    return request_id.replace(digits, digits[:SEGMENT_DIGITS])


def _position(walk: Progress) -> State:
    """The position of an output in its grammar; empty after the grammar's end."""
    position, now = walk.position, walk.now
    if position is None or now is None:
        return {}
    examples = np.flatnonzero(walk.fsm.mask(now))[:MOST_EXAMPLES].tolist()
    return {"state": position.state, "open": position.stack, "allowed": position.num_allowed, "examples": examples}


def _is_final(request: Request) -> bool:
    return request.status in (RequestStatus.FINISHED, RequestStatus.FAILED)


def _target(pool: Any) -> Any:
    """The model's pool, also if a draft model has another."""
    return getattr(pool, "target", pool)

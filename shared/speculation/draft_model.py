"""Drafts from a smaller model with the same vocabulary. Introduced in phase 11.

The draft model has its own KV cache, runner and requests (the *draft requests* of
:class:`shared.cache.pool.paired.PairedPool`). In each step, its first forward computes the tokens that it lacks of each
request and samples the first draft. Each later forward computes the previous draft, whose id never leaves the device,
and samples the next. While the set of requests stays the same, the device also advances the step, and the host only
launches. The host waits once for all drafts, after it has launched the step that verifies them.

A draft model samples with the seed, index and parameters of its request. With coupled acceptance it also uses the
request's noise, which makes equal tokens likely. With rejection sampling it uses its own noise stream and returns the
distribution of each draft.

The draft model computes a prompt in the same chunks as the model. It may lack more tokens than the model does: its
prefix tree may hold less, and it computes nothing while a request gets no drafts. It computes the missing tokens in
chunks too; until it has caught up, the request has no drafts.

Invariants: the pool counts only the request's own tokens as computed; the keys of drafts stay in their slots and count
once the drafts are accepted. A failure of the draft model costs only drafts.
"""

from collections.abc import Callable, Container, Iterator, Sequence
from functools import cached_property
from itertools import compress

import torch

from shared.cache.pool.interface import CachePoolProtocol
from shared.cache.pool.paired import PairedPool
from shared.cache.view.interface import MakeMemory
from shared.engine.batch import Batch
from shared.engine.config import EngineConfig
from shared.engine.request import Request
from shared.engine.runner import Launched, MakeRunner, Runner
from shared.engine.sampling.drawing import Step, plain
from shared.engine.sampling.sampler import Sampler, SamplerOutput
from shared.loading.loader import load_model
from shared.loading.quantized import quantizer
from shared.loading.resolve import resolve_model
from shared.models.causal_lm import CausalLM
from shared.models.fused import fuse
from shared.models.packed import pack
from shared.sampling.sampler import SamplingRow
from shared.scheduling.chunks import chunk_size
from shared.scheduling.drafts import num_equal
from shared.scheduling.schedule import Schedule, Scheduled
from shared.scheduling.step_costs import StepCosts, step_costs
from shared.speculation.draft_draw import DraftDraw
from shared.speculation.draft_memory import memory_settings
from shared.speculation.drafter import Drafter, PendingDrafts
from shared.speculation.vocabulary import check_vocabulary
from shared.text.tokenizer import Tokenizer

Asking = tuple[Request, Request, int]
"""A request, its draft request, and the number of drafts it may have."""
Drawn = tuple[list[Asking], list[int], SamplerOutput]
"""The draws of one forward: their requests, the index of each in the batch, and their ids, which may be on the device.
"""


class DraftMasks:
    """The masks of drafts, by default none. For requests with a grammar see :mod:`shared.speculation.draft_masks`."""

    def steps(self, max_rows: int) -> list[Step]:
        """The steps of the draft model's sampler."""
        return []

    def forget(self) -> None:
        """Discard the rows that follow the previous step's drafts, some of which may have been rejected."""

    def rows(self, rows: list[SamplingRow], asking: Sequence[Asking], proposed: Sequence[Drawn]) -> list[SamplingRow]:
        """The rows for the next drafts, after those ``proposed`` so far in this step, with their masks."""
        return rows


NO_MASKS = DraftMasks()


class DraftModel(Drafter):
    """A drafter that runs a draft model.

    Args:
        config: the engine's config.
        target: the model that verifies; its ``tokenizer`` must have the draft model's tokens.
        masks: the masks of the drafts (phase 12).
        load: like ``load_model``, loads the draft model, or a shard of it (phase 12.1).

    Raises ConfigError if the vocabularies differ, and whatever ``load_model`` raises.
    """

    pool: CachePoolProtocol
    runner: Runner
    pending: PendingDrafts | None = None
    proposed: Sequence[Drawn] = ()  # the step's drafts, until they are collected

    def __init__(
        self,
        config: EngineConfig,
        target: CausalLM,
        tokenizer: Tokenizer,
        *,
        masks: DraftMasks = NO_MASKS,
        load: Callable[..., CausalLM] = load_model,
    ) -> None:
        assert config.draft_model is not None
        folder = resolve_model(config.draft_model)
        quantize = quantizer(None, False)
        self.model = load(folder, dtype=target.dtype, device=target.device, quantize=quantize)
        check_vocabulary(config.draft_model, (self.model, Tokenizer.load(folder)), (target, tokenizer))
        (pack if config.pack_weights else fuse)(self.model)
        self.config, self.masks = config, masks
        self.is_masked = self.model.config.vocab_size == target.config.vocab_size
        self.distributions: dict[tuple[int, int], torch.Tensor] = {}

    def make_pool(
        self, model_pool: CachePoolProtocol, make_memory: MakeMemory, make_runner: MakeRunner, max_seq_len: int
    ) -> CachePoolProtocol:
        """The model's pool, paired with one of as many blocks for the draft model, whose runner is made too."""
        own, longest = memory_settings(self.config, model_pool), min(max_seq_len, self.model.max_positions)
        self.room = own.most_tokens_of_a_step(longest)
        self.pool, view = make_memory(own, self.model, longest)
        draw = plain if self.config.acceptance_method == "coupled" else DraftDraw(self.distributions)
        max_sequences = self.pool.max_sequences
        sampler = Sampler(self.model.device, max_sequences, self.masks.steps(max_sequences), draw)
        self.runner = make_runner(self.model, view, max_sequences, sampler=sampler)
        self.pair = PairedPool(model_pool, self.pool)
        return self.pair

    def propose(self, schedule: Schedule) -> None:
        self.distributions.clear()
        self.masks.forget()
        entries, asking = self._missing(schedule)
        if not entries:
            return
        self.runner.sampler.penalties.forget()  # these counts include the previous step's drafts
        proposed: list[Drawn] = []
        is_decode = len(asking) == len(entries) and all(entry.num_tokens == 1 for entry in entries)
        launched = self._run(schedule, entries, max(ask[2] for ask in asking) - 1 if is_decode else 0)
        for number, entry in enumerate(entries):
            if number not in launched.errors:
                self.pool.commit(entry.request, entry.num_tokens)
                entry.request.num_computed_tokens += entry.num_tokens
        numbers = [number for number, entry in enumerate(entries) if entry.num_logit_rows]
        while asking:
            rows = [draft_request.sampling_row(len(proposed))._replace(num_drafts=0) for _, draft_request, _ in asking]
            if self.is_masked:
                rows = self.masks.rows(rows, asking, proposed)
            sampled = self.runner.sample(launched, rows)
            proposed.append((asking, numbers, sampled))
            goes_on = [
                ask[2] > len(proposed) and n not in sampled.errors for ask, n in zip(asking, numbers, strict=True)
            ]
            before = [entries[number] for number in compress(numbers, goes_on)]
            entries = [Scheduled(entry.request, entry.start + entry.num_tokens, num_tokens=1) for entry in before]
            asking, numbers = list(compress(asking, goes_on)), list(range(len(entries)))
            if entries:
                again = self.runner.repeat(launched) if all(goes_on) else None
                launched = again or self._run(schedule, entries, max(ask[2] for ask in asking) - len(proposed) - 1)
        self.proposed = proposed
        if self.pending is None or not proposed:
            self.collect()
            return
        ids = iter(self.pending.put([ids for _, _, sampled in proposed for ids in sampled.ids]))
        for asking, numbers, sampled in proposed:
            _hand_out(asking, numbers, sampled.errors, ids)

    def leave_drafts_in(self, pending: PendingDrafts) -> None:
        self.pending = pending

    def collect(self) -> None:
        proposed, self.proposed = self.proposed, ()
        for request, _, _ in proposed[0][0] if proposed else ():
            request.draft_ids = []
        for asking, numbers, sampled in proposed:
            _hand_out(asking, numbers, sampled.errors, iter(sampled.wait().token_ids))

    @cached_property
    def step_costs(self) -> StepCosts:
        return step_costs(self.model)

    def _missing(self, schedule: Schedule) -> tuple[list[Scheduled], list[Asking]]:
        """The entries of the first forward, one-token entries first, and the requests that it samples for."""
        found: list[tuple[Scheduled, Asking]] = []
        room = self.room
        for number, (request, start, num_tokens, num_drafts, _, _) in enumerate(schedule):
            if num_drafts:
                request.draft_ids = []
            draft_request = self.pair.draft_requests.get(request)  # None: it ended in the step that was in flight
            is_following = number >= schedule.num_decoding and request.params.use_speculative_decoding
            if draft_request is None or not (num_drafts or is_following):
                continue
            end = request.num_tokens if num_drafts else min(start + num_tokens, request.num_tokens)
            begin = self._follow(draft_request, request)
            size = min(end - begin, room)
            if size > 0 and self.config.is_on("use_chunked_prefill"):
                size = min(size, chunk_size(self.config, size, schedule.num_decoding))
            if size > 0 and end + num_drafts <= self.pool.request_capacity:
                room -= size
                draws = bool(num_drafts) and begin + size == end
                found.append(
                    (Scheduled(draft_request, begin, size, 0, int(draws)), (request, draft_request, num_drafts))
                )
        found.sort(key=lambda pair: pair[0].num_tokens > 1)  # one-token entries have their own kernel
        return [entry for entry, _ in found], [asking for entry, asking in found if entry.num_logit_rows]

    def _follow(self, draft_request: Request, request: Request) -> int:
        """Append the tokens known by now, and count the accepted drafts, whose keys are cached. Returns the number of
        tokens in the draft model's cache.
        """
        for token_id in request.output_ids[len(draft_request.output_ids) :]:
            draft_request.append(token_id)
        length = self.pool.length(draft_request)
        written = draft_request.draft_ids[:-1]  # the last draft was not computed
        known = request.ids(length, length + len(written))  # fewer than the drafts if their step was interrupted
        num_right = num_equal(known, written[: len(known)])
        self.pool.commit(draft_request, num_right)
        draft_request.draft_ids = []
        draft_request.num_computed_tokens = length + num_right
        return draft_request.num_computed_tokens

    def _run(self, schedule: Schedule, entries: Sequence[Scheduled], num_ahead: int) -> Launched:
        num_single = sum([entry.num_tokens == 1 for entry in entries])
        own = Schedule(schedule.step, tuple(entries), num_single, num_ahead=num_ahead)
        return self.runner.forward(Batch.of(own, self.pool))


def _hand_out(
    asking: Sequence[Asking], numbers: Sequence[int], errors: Container[int], token_ids: Iterator[int]
) -> None:
    """Append a draft to each request, unless its draft failed; it gets no more in this step."""
    for (request, draft_request, _), number in zip(asking, numbers, strict=True):
        if number not in errors:
            request.draft_ids.append(next(token_ids))
            draft_request.draft_ids = list(request.draft_ids)

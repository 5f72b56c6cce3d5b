"""Drafts by the model itself, from the hidden states of the previous step's mask tokens. Introduced in phase 11.1.

There is no second model and no second KV cache. The runner keeps the hidden states of each group of mask tokens. Once
the step's tokens are known, the drafter uses the group after the last accepted token. The adapter's sampler head turns
it into drafts one at a time, since each depends on the previous one.

If the head's passes are captured and drafting is greedy, the GPU does not wait for the host to choose the group: it
makes drafts from all groups right after the step, and the host picks the ones it needs.

Drafts are sampled like a draft model's: with the request's noise, or, for rejection sampling, from their own stream
(:mod:`shared.speculation.draft_model`).

Invariant: states are used in the step after the one that computed them, or not at all.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shared.cache.pool.interface import CachePoolProtocol
from shared.cache.view.interface import MakeMemory
from shared.engine.config import EngineConfig
from shared.engine.executor.graphs import CudaGraphCapture
from shared.engine.executor.last_ids import LastIds
from shared.engine.request import Request, RequestStatus
from shared.engine.runner import Launched, MakeRunner
from shared.engine.sampling.drawing import plain
from shared.engine.sampling.sampler import Draws, Sampler, SamplerOutput
from shared.models.causal_lm import CausalLM
from shared.sampling.params import SamplingParams
from shared.sampling.sampler import SamplingRow
from shared.scheduling.schedule import Schedule
from shared.scheduling.step_costs import StepCosts, head_costs
from shared.speculation.draft_draw import DraftDraw
from shared.speculation.drafter import Drafter, PendingDrafts
from shared.text.tokenizer import Tokenizer
from shared.tracks.multi_token.adapter import load_adapter
from shared.tracks.multi_token.captured_head import CapturedHead
from shared.tracks.multi_token.lora import adapt
from shared.tracks.multi_token.mask_states import MaskObserver, MaskStates

Asking = tuple[Request, Tensor, int, int]
"""A request, the hidden states ``[groups, k, H]`` of its masks, the group to use, and the number of drafts it may have.
"""
Drawn = tuple[Sequence[Request | None], SamplerOutput]
"""Drafts in the order of their requests; None: without a request, or not to be verified."""


class Ahead(NamedTuple):
    """Drafts after each token of a step, made before it is known which tokens are accepted: ``k`` drafts after each
    row."""

    k: int
    first_rows: Mapping[str, int]  # by request id
    ids: range  # where the drafts are on the device
    sampled: SamplerOutput


class MultiTokenDrafter(Drafter):
    """The model as its own drafter.

    Args:
        config: the engine's config, with an adapter.
        model: receives the adapter's additions.

    Raises whatever ``load_adapter`` raises.
    """

    sampler: Sampler
    pending: PendingDrafts | None = None
    drawn: Sequence[Drawn] = ()  # the step's drafts, until they are collected
    captured: CapturedHead | None = None
    ahead: Ahead | None = None  # from the previous step

    def __init__(self, config: EngineConfig, model: CausalLM, tokenizer: Tokenizer) -> None:
        assert config.adapter is not None
        self.model, self.is_coupled = model, config.acceptance_method == "coupled"
        self.is_capturing = config.is_on("use_cuda_graphs") and model.device.type == "cuda"
        self.adapter = load_adapter(Path(config.adapter).expanduser(), model)
        adapt(model, self.adapter.additions(), self.adapter.masks)
        self.logits: Callable[[Tensor, Tensor], Tensor] = partial(self.adapter.logits, model)
        self.distributions: dict[tuple[int, int], Tensor] = {}
        self.states: dict[str, MaskStates] = {}  # of the last step, by request id; set by the runner's observer

    def make_pool(
        self, model_pool: CachePoolProtocol, make_memory: MakeMemory, make_runner: MakeRunner, max_seq_len: int
    ) -> CachePoolProtocol:
        """The model's pool alone; the sampler of drafts is made too."""
        draw = plain if self.is_coupled else DraftDraw(self.distributions)
        self.sampler = Sampler(self.model.device, model_pool.max_sequences, draw=draw)
        if self.is_capturing:
            capture = CudaGraphCapture(self.model.device)
            self.logits = self.captured = CapturedHead(self.adapter, self.model, model_pool.max_sequences, capture)
        return model_pool

    def propose(self, schedule: Schedule) -> None:
        self.distributions.clear()
        asking: list[Asking] = []
        for request, *_, num_drafts, _, _ in schedule:
            if num_drafts:
                request.draft_ids = []
                states = self.states.get(request.request_id)
                group = None if states is None else group_of_next(request.num_tokens, states.start)
                is_running = request.status is RequestStatus.RUNNING
                if states is not None and group is not None and is_running and 0 <= group < len(states.hidden):
                    asking.append((request, states.hidden, group, num_drafts))
        ahead, self.ahead = self.ahead, None
        self.states.clear()
        if asking and ahead is not None:
            self.drawn = [(_chosen(asking, ahead), ahead.sampled)]
            _append(self.drawn[0][0], ahead.ids)
        elif asking:
            self.drawn = self._draw(asking)
            self._hand_out()

    def follow(self, launched: Launched, rows: Sequence[SamplingRow], sampled: SamplerOutput) -> None:
        """Sample drafts after every real token of the step just launched that has masks, if greedy drafts suffice.

        Args:
            rows: the step's logit rows.
            sampled: the tokens sampled from them.
        """
        captured, pending, batch = self.captured, self.pending, launched.batch
        if captured is None or pending is None or sampled.errors or len(sampled.ids) != 1:
            return
        first_rows, num_rows, previous = dict[str, int](), 0, []
        for name, states in self.states.items():
            count, sequence = len(states.hidden), batch.request_ids.index(name)
            first = int(np.searchsorted(batch.logit_sequences, sequence))
            if not _takes_likeliest(rows[first].params):
                return
            previous.append(sampled.ids[0][first : first + count])
            first_rows[name], num_rows = num_rows, num_rows + count
        hidden = [states.hidden for states in self.states.values()]
        k = max(of_request.shape[1] for of_request in hidden)  # the adapter may have more masks than are used
        guesses = captured.guess(previous, hidden)[:, :k].flatten()
        self.ahead = Ahead(k, first_rows, pending.put([guesses]), SamplerOutput([Draws(guesses)]))

    @cached_property
    def step_costs(self) -> StepCosts:
        """The cost of one pass of the sampler head and the output head."""
        return head_costs(self.model)

    def num_tokens(self, num_drafts: int) -> int:
        """This many masks follow each real token."""
        return (num_drafts + 1) ** 2

    def _draw(self, asking: Sequence[Asking]) -> list[Drawn]:
        """Sample drafts for all requests at once, one position at a time."""
        self.sampler.penalties.forget()  # these counts include the previous step's drafts
        table_rows = list(range(len(asking)))
        previous = self.sampler.upload(torch.tensor([request.last_token_id for request, *_ in asking]))
        drawn: list[Drawn] = []
        for number in range(max(num_drafts for *_, num_drafts in asking)):
            going_on = [n for n in table_rows if asking[n][3] > number]
            if len(going_on) < len(table_rows):
                previous = previous[self.sampler.upload(torch.tensor([table_rows.index(n) for n in going_on]))]
                table_rows = going_on
            hidden = torch.stack([asking[n][1][asking[n][2], number] for n in table_rows])
            logits = self.logits(previous, hidden)
            rows = [asking[n][0].sampling_row(number)._replace(num_drafts=0) for n in table_rows]
            draws = self.sampler.sample(logits, rows, table_rows)
            previous = draws.ids
            drawn.append(([asking[n][0] for n in table_rows], SamplerOutput([draws])))
        return drawn

    def _hand_out(self) -> None:
        """Give each request its drafts: their locations on the device, or their ids."""
        if self.pending is None:
            self.collect()
            return
        ids = iter(self.pending.put([ids for _, sampled in self.drawn for ids in sampled.ids]))
        for requests, _ in self.drawn:
            _append(requests, ids)

    def leave_drafts_in(self, pending: PendingDrafts) -> None:
        self.pending = pending

    def collect(self) -> None:
        drawn, self.drawn = self.drawn, ()
        for request in drawn[0][0] if drawn else ():
            if request is not None:
                request.draft_ids = []
        for requests, sampled in drawn:
            _append(requests, sampled.wait().token_ids)


def observers_of(drafter: Drafter) -> list[MaskObserver]:
    """The observer that passes the runner's steps to the drafter."""
    return [MaskObserver(drafter.states, drafter.follow)] if isinstance(drafter, MultiTokenDrafter) else []


def ids_of_guesses(max_sequences: int, most_logit_rows: int, device: torch.device) -> LastIds:
    """The ids on the device, with guesses after each of a sequence's logit rows."""
    return LastIds(max_sequences, 1 + most_logit_rows * (most_logit_rows - 1), device)


def _chosen(asking: Sequence[Asking], ahead: Ahead) -> list[Request | None]:
    """The request of each draft made ahead that will be verified."""
    chosen: list[Request | None] = [None] * len(ahead.ids)
    for request, _, group, num_drafts in asking:
        first = ahead.k * (ahead.first_rows[request.request_id] + group)
        chosen[first : first + num_drafts] = [request] * num_drafts
    return chosen


def _takes_likeliest(params: SamplingParams) -> bool:
    """Whether the sampled tokens are the arg-max of the unedited logits."""
    return params.is_greedy and not params.adjusts_logits and params.min_tokens == 0


def _append(requests: Sequence[Request | None], ids: Iterable[int]) -> None:
    """Append one of the ids to the drafts of each request."""
    for request, token_id in zip(requests, ids, strict=False):
        if request is not None:
            request.draft_ids.append(token_id)


def group_of_next(num_tokens: int, start: int) -> int:
    """The group of masks after a step's last accepted token.

    Args:
        num_tokens: the request's known tokens, including the step's accepted drafts and the token sampled after them.
        start: the index of the step's first token of the request.
    """
    # exercise 11.1x3: which group of masks followed what was accepted
    # hint: the step computed the token at `start`, and drafts; group 0 came after the first of these tokens
    # hint: the newest known token was sampled in this step, after the last accepted one: it was not computed
    return num_tokens - 2 - start
    # end exercise

"""Masks for drafts: a draft model samples under its requests' grammars. Introduced in phase 12.

Without masks a draft model proposes tokens that the grammar refuses, and all later drafts are lost with them. On a GPU,
the draft model's sampler computes masks as the model's does, in its own table rows. These rows advance with drafts that
may be rejected, so they are cleared before the next step's drafts. On a CPU, the host knows the drafts and computes the
masks from them.

Invariant: a draft is sampled from the tokens that its grammar allows after the drafts before it. Exceptions, which stay
unmasked: drafts of a model with a different number of logits and, on a GPU, drafts for grammars whose tables are not
loaded or whose end ``min_tokens`` forbids. If a draw on a GPU fails after the first draft, the mask of its repetition
lacks the earlier drafts; that costs drafts, but changes no token.
"""

from collections.abc import Callable, Sequence

from shared.engine.config import EngineConfig
from shared.engine.request import Request
from shared.engine.sampling.drawing import Step
from shared.engine.sampling.grammar_masks import host_masks
from shared.engine.sampling.grammar_rows import GrammarRows
from shared.grammar.constraint import Constraint
from shared.grammar.tokens.pool import GrammarPool
from shared.loading.loader import load_model
from shared.models.causal_lm import CausalLM
from shared.sampling.sampler import SamplingRow
from shared.speculation.draft_model import Asking, DraftMasks, DraftModel, Drawn
from shared.text.tokenizer import Tokenizer


class DeviceMasks(DraftMasks):
    """The device computes the masks, from the tables of ``pool``."""

    grammar_rows: GrammarRows

    def __init__(self, pool: GrammarPool) -> None:
        self.pool = pool

    def steps(self, max_rows: int) -> list[Step]:
        self.grammar_rows = GrammarRows(max_rows, self.pool)
        return [self.grammar_rows]

    def forget(self) -> None:
        self.grammar_rows.forget()

    def rows(self, rows: list[SamplingRow], asking: Sequence[Asking], proposed: Sequence[Drawn]) -> list[SamplingRow]:
        for number, (request, _, _) in enumerate(asking):
            constraint = request.constraint
            if isinstance(constraint, Constraint) and constraint.base is not None and not rows[number].masked_ids:
                rows[number] = rows[number]._replace(constraint=constraint)
        return rows


class HostMasks(DraftMasks):
    """The host computes the masks, after waiting for the drafts."""

    def steps(self, max_rows: int) -> list[Step]:
        return [host_masks]

    def rows(self, rows: list[SamplingRow], asking: Sequence[Asking], proposed: Sequence[Drawn]) -> list[SamplingRow]:
        constraints = [request.constraint for request, _, _ in asking]
        if not any(constraint is not None for constraint in constraints):
            return rows
        drafts: dict[Request, list[int]] = {}
        for asked, numbers, sampled in proposed:
            known = sampled.wait()
            left = [request for (request, _, _), n in zip(asked, numbers, strict=True) if n not in known.errors]
            for request, token_id in zip(left, known.token_ids, strict=True):
                drafts.setdefault(request, []).append(token_id)
        for number, (request, _, _) in enumerate(asking):
            constraint = constraints[number]
            if not isinstance(constraint, Constraint):
                continue
            state = constraint.after(request.output_ids)
            for token_id in drafts.get(request, ()):
                state = state and constraint.fsm.next_state(state, token_id)
            if state is not None:
                rows[number] = rows[number]._replace(allowed=constraint.fsm.mask(state))
        return rows


def masked_draft_model(
    config: EngineConfig,
    target: CausalLM,
    tokenizer: Tokenizer,
    pool: GrammarPool | None,
    load: Callable[..., CausalLM] = load_model,
) -> DraftModel:
    """A draft model whose masks come from the tables in ``pool``, on the device; None: the host computes the masks."""
    masks = HostMasks() if pool is None else DeviceMasks(pool)
    return DraftModel(config, target, tokenizer, masks=masks, load=load)

"""A draft model that draws under the grammars of its requests, as the model that verifies does. Introduced in phase 12.

Without masks a draft model proposes what the grammar refuses, and the rest of its drafts is lost with that token. On a
GPU its sampler finds the masks as the model's does, in rows of its own: they stand behind drafts, which may turn out
wrong, so all are forgotten when the next step is drafted. On a CPU the drafts are known here, and masks are made from
them.

Invariant: a draft is drawn from the tokens that its grammar allows behind the drafts before it. Not masked are drafts
of a model with another number of logits, and on a GPU those of grammars whose tables are not there, or while
``min_tokens`` forbids the end.
"""

from collections.abc import Callable, Sequence
from functools import partial

from shared.engine.config import EngineConfig
from shared.engine.grammar_sampler import GrammarSampler
from shared.engine.request import Request
from shared.engine.sampler import Sampler
from shared.grammar.constraint import Constraint
from shared.grammar.pool import GrammarPool
from shared.loading.loader import load_model
from shared.models.causal_lm import CausalLM
from shared.sampling.sampler import SamplingRow
from shared.scheduling.schedule import Schedule
from shared.speculation.draft_model import Asking, DraftModel, Drawn
from shared.speculation.draft_sampler import DraftSampler
from shared.text.tokenizer import Tokenizer


class GrammarDraftSampler(GrammarSampler, DraftSampler):
    """As :class:`DraftSampler`: a draft that the grammar does not allow has the probability 0."""

    notes_draws = True


class MaskedDraftModel(DraftModel):
    """As :class:`DraftModel`, of the tokens that each request's grammar allows.

    Args:
        grammar_pool: the tables of the grammars on the device; None: masks are made on the host.
    """

    def __init__(
        self,
        config: EngineConfig,
        target: CausalLM,
        tokenizer: Tokenizer,
        grammar_pool: GrammarPool | None,
        load: Callable[..., CausalLM] = load_model,
    ) -> None:
        super().__init__(config, target, tokenizer, load)
        self.grammar_pool = grammar_pool
        self.is_masked = self.model.config.vocab_size == target.config.vocab_size

    def propose(self, schedule: Schedule) -> None:
        """See :class:`shared.speculation.drafter.Drafter`."""
        sampler = self.runner.sampler
        assert isinstance(sampler, GrammarSampler)
        if sampler.grammar_rows is not None:
            sampler.grammar_rows.forget()
        super().propose(schedule)

    def _make_sampler(self) -> Callable[..., Sampler]:
        if self.config.acceptance_method == "coupled":
            return partial(GrammarSampler, pool=self.grammar_pool)
        return partial(GrammarDraftSampler, pool=self.grammar_pool, distributions=self.distributions)

    def _rows(self, asking: Sequence[Asking], drawn: Sequence[Drawn]) -> list[SamplingRow]:
        rows = super()._rows(asking, drawn)
        drafts: dict[Request, list[int]] = {}
        if self.grammar_pool is None and any(request.constraint is not None for request, _, _ in asking):
            for asked, numbers, sampled in drawn:
                known = sampled.wait()
                left = [request for (request, _, _), n in zip(asked, numbers, strict=True) if n not in known.errors]
                for request, token_id in zip(left, known.token_ids, strict=True):
                    drafts.setdefault(request, []).append(token_id)
        for number, (request, _, _) in enumerate(asking):
            constraint = request.constraint
            if not isinstance(constraint, Constraint) or not self.is_masked:
                continue
            if self.grammar_pool is None:
                state = constraint.after(request.output_ids)
                for token_id in drafts.get(request, ()):
                    state = state and constraint.fsm.next_state(state, token_id)
                if state is not None:
                    rows[number] = rows[number]._replace(allowed=constraint.fsm.mask(state))
            elif constraint.base is not None and not rows[number].masked_ids:
                rows[number] = rows[number]._replace(constraint=constraint)
        return rows

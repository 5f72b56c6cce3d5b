"""What drafts cost on top of a plain step, from the tables of step costs. Introduced in phase 11.

Invariant: no clock is read, so the same counts give the same costs; see :mod:`shared.scheduling.step_costs`.
"""

from dataclasses import dataclass
from typing import Any, cast

from shared.models.causal_lm import CausalLM
from shared.scheduling.scheduler import Scheduler
from shared.scheduling.step_costs import StepCosts, step_costs
from shared.speculation.adaptive import DraftCosts
from shared.speculation.drafter import Drafter


@dataclass(frozen=True)
class TableCosts:
    """The costs of drafts by a table; a :class:`shared.speculation.adaptive.CostsOf`."""

    steps: StepCosts
    drafter: Drafter

    def __call__(self, num_requests: int, context: int, longest: int) -> DraftCosts:
        """See :class:`shared.speculation.adaptive.CostsOf`."""
        steps, drafting, B = self.steps, self.drafter.step_costs, num_requests
        short, long = (B * self.drafter.num_tokens(num_drafts) for num_drafts in (1, longest))
        return DraftCosts(
            plain=steps.cost(B, context),
            short=steps.cost(short, context, num_drafts=B),
            long=steps.cost(long, context, num_drafts=B * longest),
            first=0.0 if drafting is None else drafting.cost(2 * B, context, num_drafts=B),
            more=0.0 if drafting is None else drafting.cost(B, context),
        )


def set_draft_costs(scheduler: Scheduler, model: CausalLM, drafter: Drafter) -> None:
    """Let a scheduler that grants drafts choose their numbers from the tables of the model and the drafter. Raises
    whatever :func:`shared.scheduling.step_costs.step_costs` raises.
    """
    if not scheduler.config.use_speculative_decoding:
        return
    steps, drafting = step_costs(model), drafter.step_costs
    cast(Any, scheduler).lengths.costs_of = TableCosts(steps, drafter)  # only such schedulers speculate
    scheduler.step_costs = steps.hash if drafting is None else f"{steps.hash}+{drafting.hash}"

"""Chunked prefill: long prompts are computed over several steps, beside decoding. Introduced in phase 7.

A whole prompt of 8,192 tokens makes a step a hundred times as long, and every decoding request waits for it. In chunks
(Sarathi-Serve: Agrawal et al., OSDI 2024) the decoding requests get a token between any two chunks, and a step with
both reads each weight once for all its tokens. A chunk attends to the keys of the chunks before it, so the results are
those of the whole prompt; only the step that computes the last known token of a request samples.

A step is filled up to ``max_num_batched_tokens``: decoding requests first, then chunks of at most
``prefill_chunk_size`` tokens, in the order of admission, at most ``max_prefill_chunks_per_step``. Small chunks bound
the time between tokens, large ones bring the first token sooner.

Invariants: a step computes at most ``max_num_batched_tokens``, or one more than its decoding requests, so a prompt
progresses in each step; the oldest unfinished prompt has a chunk in every step with chunks.
"""

from collections.abc import Iterable, Sequence

from shared.cache.pool import CachePoolProtocol
from shared.engine.config import EngineConfig
from shared.engine.request import Request
from shared.scheduling.preemption import PreemptiveScheduler
from shared.scheduling.schedule import Schedule


class ChunkedScheduler(PreemptiveScheduler):
    """Divides prompts into chunks. Admission, preemption and policies are those of :class:`PreemptiveScheduler`.

    The KV cache of a whole prompt is reserved at admission, so a chunk never lacks room. Without
    ``use_chunked_prefill`` prompts stay whole.
    """

    def __init__(self, config: EngineConfig, pool: CachePoolProtocol, max_seq_len: int) -> None:
        super().__init__(config, pool, max_seq_len)
        self.is_chunked = config.is_on("use_chunked_prefill")

    def _prompts(self) -> list[Request]:
        """The requests whose prompts, or recomputed tokens, are not scheduled to the end; in order of admission."""
        if not self.is_chunked:
            return super()._prompts()
        # exercise 07x2: find the prompts that are not completely computed
        # hint: self.running holds the running requests by id, in order of admission
        # hint: see Request.is_prefilling; why is `num_computed_tokens < num_prompt_tokens` not enough?
        # hint: the token budget is not applied here, but to the chunks
        return [request for request in self.running.values() if request.is_prefilling]
        # end exercise

    def _plan(self, decoding: Sequence[Request], prompts: Sequence[Request], preempted: Iterable[str] = ()) -> Schedule:
        """Schedule one token of each decoding request, then chunks of prompts within the token budget."""
        if not self.is_chunked:
            return super()._plan(decoding, prompts, preempted)
        # exercise 07x4: decoding requests first, then the chunks
        # hint: _grant makes an entry and counts its tokens; leave the entries, in the order of the batch, in `entries`
        # hint: a decoding request is granted its one unscheduled token
        # hint: _chunk_sizes takes the unscheduled tokens of each prompt, and returns sizes for the first of them
        # hint: a prompt without a chunk in this step has no entry
        entries = [self._grant(request, request.num_unscheduled_tokens) for request in decoding]
        sizes = self._chunk_sizes([request.num_unscheduled_tokens for request in prompts], len(decoding))
        entries += [self._grant(*chunk) for chunk in zip(prompts, sizes, strict=False)]
        # end exercise
        return Schedule(self.num_steps, tuple(entries), len(decoding), tuple(preempted))

    def _is_last(self, request: Request, num_tokens: int) -> bool:
        """Whether the next ``num_tokens`` tokens leave none of the request's tokens to compute; then it samples."""
        # exercise 07x3: only the last chunk samples
        # hint: num_unscheduled_tokens counts the tokens that no step has computed or is computing
        # hint: the end of the prompt is not the measure: after a preemption outputs are recomputed too
        return num_tokens == request.num_unscheduled_tokens
        # end exercise

    def _chunk_sizes(self, num_unscheduled: Sequence[int], num_decoding: int) -> list[int]:
        """The tokens of each chunk of a step.

        Args:
            num_unscheduled: the tokens that remain of each prompt, in the order of admission.
            num_decoding: decoding requests of the step; each computes one token.

        Returns:
            A size of at least 1 for as many of the prompts, from the first, as have a chunk in the step.
        """
        # exercise 07x1: fill the step with chunks
        # hint: the budget is max_num_batched_tokens minus the decoding tokens, but at least 1: a prompt progresses
        # hint: a chunk is at most prefill_chunk_size, the rest of its prompt, and the rest of the budget
        # hint: stop when the budget is used up, or after max_prefill_chunks_per_step chunks (None: no limit)
        budget = max(self.config.max_num_batched_tokens - num_decoding, 1)
        sizes: list[int] = []
        for remaining in num_unscheduled[: self.config.max_prefill_chunks_per_step]:
            if budget == 0:
                break
            sizes.append(min(remaining, self.config.prefill_chunk_size, budget))
            budget -= sizes[-1]
        # end exercise
        return sizes

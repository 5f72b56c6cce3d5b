"""Prefill in chunks: a step is filled with decoding requests first, then with parts of prompts. Introduced in phase 7.

A step has at most ``max_num_batched_tokens``: decoding requests first, then chunks of at most
``prefill_chunk_size`` tokens, in the order of admission, at most ``max_prefill_chunks_per_step``. Small chunks bound
the time between tokens, and large ones produce the first token sooner. So by default a chunk is large while nothing
decodes, and a step has no more tokens than keep a GPU busy: the first prompts do not wait for all others.

Invariants: a step computes at most ``max_num_batched_tokens``, or one more than its decoding requests, so a prompt
progresses in each step; the oldest unfinished prompt has a chunk in every step with chunks.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from operator import attrgetter

from shared.engine.config import EngineConfig
from shared.engine.request import Request
from shared.scheduling.prefill import WholePrompts, grant
from shared.scheduling.schedule import Scheduled

BESIDE_DECODING = 512
"""Default tokens of a chunk alongside decoding requests, a compromise: the first token comes little later than with
larger chunks, and a step of a 1B model takes a few milliseconds on a GPU."""
ALONE = 4096
"""About as many tokens as a step has while nothing decodes: with more, a prompt's first token arrives no sooner."""
UNSCHEDULED: Callable[[Request], int] = attrgetter("num_unscheduled_tokens")


class Chunks:
    """Divides prompts into chunks; the alternative is :class:`shared.scheduling.prefill.WholePrompts`.

    Args:
        remaining: the tokens that a request may still compute, at least 1.
    """

    def __init__(self, config: EngineConfig, remaining: Callable[[Request], int] = UNSCHEDULED) -> None:
        self.config, self.remaining = config, remaining

    def prompts(self, running: Iterable[Request]) -> list[Request]:
        """The requests whose prompts, or recomputed tokens, are not fully scheduled; in order of admission.

        Args:
            running: the running requests, in order of admission.
        """
        # exercise 07x2: find the prompts that are not completely computed
        # hint: see Request.is_prefilling; why is `num_computed_tokens < num_prompt_tokens` not enough?
        # hint: the token budget is not applied here, but to the chunks
        return [request for request in running if request.is_prefilling]
        # end exercise

    def fill(self, decoding: Sequence[Request], prompts: Sequence[Request]) -> tuple[Scheduled, ...]:
        """The entries of a step: one token of each decoding request, then chunks of prompts within the token budget."""
        # exercise 07x4: decoding requests first, then the chunks
        # hint: grant makes an entry and counts its tokens; leave the entries, in the order of the batch, in `entries`
        # hint: a decoding request is granted its one unscheduled token
        # hint: self.sizes takes what remains of each prompt (self.remaining), and returns sizes for the first of them
        # hint: a prompt without a chunk in this step has no entry; of the others only the last chunk samples (is_last)
        entries = [grant(request, request.num_unscheduled_tokens) for request in decoding]
        sizes = self.sizes([self.remaining(request) for request in prompts], len(decoding))
        for request, size in zip(prompts, sizes, strict=False):
            entries.append(grant(request, size, is_last=is_last(request, size)))
        # end exercise
        return tuple(entries)

    def sizes(self, num_unscheduled: Sequence[int], num_decoding: int) -> list[int]:
        """The tokens of each chunk of a step.

        Args:
            num_unscheduled: the number of remaining tokens of each prompt, in order of admission.
            num_decoding: decoding requests of the step; each computes one token.

        Returns:
            One size, at least 1, for each prompt that has a chunk in the step: the first ones in order.
        """
        # exercise 07x1: fill the step with chunks
        # hint: only the first max_prefill_chunks_per_step prompts may have a chunk (None: all)
        # hint: the budget is max_num_batched_tokens minus the decoding tokens, but at least 1: a prompt progresses
        # hint: it is also at most step_size (below), which takes what remains of each of these prompts
        # hint: a chunk is at most its chunk_size (below), the rest of its prompt, and the rest of the budget
        # hint: stop when the budget is used up
        prompts = num_unscheduled[: self.config.max_prefill_chunks_per_step]
        budget = max(self.config.max_num_batched_tokens - num_decoding, 1)
        budget = min(budget, step_size(self.config, prompts, num_decoding))
        sizes: list[int] = []
        for remaining in prompts:
            if budget == 0:
                break
            sizes.append(min(remaining, chunk_size(self.config, remaining, num_decoding), budget))
            budget -= sizes[-1]
        # end exercise
        return sizes


def chunk_size(config: EngineConfig, remaining: int, num_decoding: int) -> int:
    """The tokens of a prompt's next chunk, budget permitting: ``prefill_chunk_size``; by default few beside decoding
    requests, and otherwise an even share of the rest of the prompt.

    Args:
        remaining: unscheduled tokens of the prompt, at least 1.
        num_decoding: decoding requests of the step.
    """
    if config.prefill_chunk_size is not None:
        return config.prefill_chunk_size
    if num_decoding:
        return config.chunk_beside_decoding or BESIDE_DECODING
    return even_share(remaining, -(-remaining // config.max_num_batched_tokens))


def step_size(config: EngineConfig, num_unscheduled: Sequence[int], num_decoding: int) -> int:
    """Maximum tokens of a step's chunks together, budget permitting. By default, while nothing decodes, the prompts are
    divided evenly among steps: the first ones have their first tokens after the first step, and while a GPU computes a
    step, the next is prepared.

    Args:
        num_unscheduled: the number of remaining tokens of each prompt that may have a chunk in the step. Those that the
            budget would not reach do not count, so it does not matter whether they are in the queue yet.
        num_decoding: decoding requests of the step.
    """
    most = config.max_num_batched_tokens
    if config.prefill_chunk_size is not None or num_decoding:
        return most
    return even_share(next((total for total in accumulate(num_unscheduled) if total >= most), sum(num_unscheduled)))


def even_share(num_tokens: int, least_parts: int = 1) -> int:
    """The tokens of a part if these are divided evenly into parts of about ``ALONE`` tokens, at least so many parts; so
    no tiny part is left at the end."""
    return -(-num_tokens // max(least_parts, round(num_tokens / ALONE)))


def is_last(request: Request, num_tokens: int) -> bool:
    """Whether the next ``num_tokens`` tokens are the last ones that the request has to compute; then it samples."""
    # exercise 07x3: only the last chunk samples
    # hint: num_unscheduled_tokens counts the tokens that no step has computed or is computing
    # hint: the end of the prompt is not the measure: after a preemption outputs are recomputed too
    return num_tokens == request.num_unscheduled_tokens
    # end exercise


def prefill_of(config: EngineConfig) -> Chunks | WholePrompts:
    """How the settings divide prompts."""
    return Chunks(config) if config.is_on("use_chunked_prefill") else WholePrompts(config)

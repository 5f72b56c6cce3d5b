"""One prompt on its way to an answer. Introduced in phase 2.

A request holds ids and counts, never tensors, text or queues, so it could leave the process. Invariant: its tokens are
the prompt followed by the outputs, and only ``append`` changes them.
"""

from dataclasses import dataclass, field

from shared.sampling.params import SamplingParams
from shared.sampling.sampler import SamplingRow


@dataclass
class Request:
    """``seed`` is the request's own even where its params leave it open, so that its noise never depends on others."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    output_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0  # tokens whose keys and values the memory holds; set by the engine

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def token_ids(self) -> list[int]:
        """Prompt and outputs."""
        return self.prompt_ids + self.output_ids

    def append(self, token_id: int) -> None:
        self.output_ids.append(token_id)

    def sampling_row(self) -> SamplingRow:
        """What the sampler needs to draw the next token."""
        return SamplingRow(self.params, self.seed, len(self.output_ids), self.token_ids)

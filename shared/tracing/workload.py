"""The workload of a traced engine: prompts with their arrival steps. Introduced in phase 4.

Arrivals are counted in steps, not in seconds, so a run is the same on fast and slow machines, and two schedulers can be
compared on the same requests. Invariant: a seed gives the same requests on every machine.
"""

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from shared.engine.prompt import check_prompt
from shared.errors import ConfigError, RequestError
from shared.grammar.grammar import Grammar
from shared.sampling.params import SamplingParams
from shared.text.tokenizer import Tokenizer
from shared.tracing.recorder import Recorder

MAX_REQUESTS = 256
MAX_STEPS = 10_000
"""Maximum number of steps of a readable timeline."""
SHORTEST_PROMPT, LONGEST_PROMPT = 8, 64
DOCUMENT_TOKENS, DOCUMENTS_EACH = 48, 2
SHORTEST_SHARE = 8
"""Outputs of the mixed workload have at least an eighth of the maximum tokens."""


@dataclass(frozen=True)
class Arrival:
    """One request, which arrives before step ``step``; ``text`` is its prompt, if given as text; ``segments`` precede
    it."""

    step: int
    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    text: str | None = None
    segments: tuple[tuple[int, ...], ...] = ()


def chosen_documents(count: int, num_requests: int, *, vocab_size: int, seed: int) -> list[tuple[tuple[int, ...], ...]]:
    """For each request, two of ``count`` documents of random ids, in random order; one if there is only one
    document."""
    rng = random.Random(f"documents {seed}")
    documents = [tuple(rng.randrange(vocab_size) for _ in range(DOCUMENT_TOKENS)) for _ in range(count)]
    return [tuple(rng.sample(documents, min(count, DOCUMENTS_EACH))) for _ in range(num_requests)]


def mixed_requests(
    num_requests: int, *, vocab_size: int, max_seq_len: int, max_new_tokens: int, seed: int, shared_prefix: int = 0
) -> list[tuple[tuple[int, ...], SamplingParams]]:
    """Prompts of random ids and outputs of fixed lengths, both log-uniform, so short ones are more frequent.

    Prompts have 8 to 64 tokens, and outputs between an eighth of ``max_new_tokens`` and all of it, ignoring
    end-of-sequence; both are limited to the model's maximum. All prompts begin with the same ``shared_prefix`` tokens,
    in addition.

    Raises:
        ConfigError: the shared prefix leaves no space for a further prompt token and one output token.
    """
    if not 0 <= shared_prefix <= max_seq_len - 2:
        raise ConfigError(
            f"The shared prefix has {shared_prefix} tokens; it must have 0 to {max_seq_len - 2}, since prompt and "
            f"output together have {max_seq_len} at most."
        )
    rng = random.Random(f"prefix {seed}")
    prefix = tuple(rng.randrange(vocab_size) for _ in range(shared_prefix))
    rng = random.Random(seed)
    requests = []
    for _ in range(num_requests):
        length = min(_log_uniform(rng, SHORTEST_PROMPT, LONGEST_PROMPT), (max_seq_len - shared_prefix) // 2)
        new_tokens = _log_uniform(rng, max(1, max_new_tokens // SHORTEST_SHARE), max_new_tokens)
        ids = tuple(rng.randrange(vocab_size) for _ in range(length))
        requests.append((prefix + ids, SamplingParams(temperature=0.0, max_new_tokens=new_tokens, ignore_eos=True)))
    return requests


def read_prompts(path: Path) -> list[tuple[int, str]]:
    """The non-blank lines of a file, numbered from 1; raises ConfigError if there are none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"--prompts is {str(path)!r}, which cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--prompts is {str(path)!r}, which is no UTF-8 text (byte {error.start}); save it as UTF-8, one prompt in "
            "each line."
        ) from None
    texts = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not texts:
        raise ConfigError(f"--prompts is {str(path)!r}, which contains no text; put one prompt in each line.")
    return texts


def text_requests(
    texts: Sequence[tuple[int, str]], *, tokenizer: Tokenizer, vocab_size: int, max_seq_len: int, max_new_tokens: int
) -> list[tuple[tuple[int, ...], SamplingParams]]:
    """Greedy requests from numbered lines; raises RequestError, with the line number, for an invalid prompt."""
    params = SamplingParams(temperature=0.0, max_new_tokens=max_new_tokens)
    requests = []
    for number, text in texts:
        try:
            ids = check_prompt(tokenizer.encode(text), vocab_size, max_seq_len)
        except RequestError as error:
            raise RequestError(f"Line {number}: {error}") from None
        requests.append((tuple(ids), params))
    return requests


def constrained(params: SamplingParams, grammar: Grammar | None) -> SamplingParams:
    """The parameters with a grammar, which then ends the output; unchanged without one."""
    return params if grammar is None else replace(params, structured_output=grammar, ignore_eos=False)


def arrival_steps(num_requests: int, *, every: int = 0, rate: float | None = None, seed: int = 0) -> list[int]:
    """The step before which each request arrives, the first before step 0.

    Args:
        every: steps between two requests; 0: all arrive at once.
        rate: instead of ``every``, the mean number of requests per step, with exponential gaps (Poisson arrivals).

    Raises:
        ConfigError: ``every`` or ``rate`` is out of range, or the last arrival is beyond the timeline.
    """
    if every < 0:
        raise ConfigError(
            f"The steps between two requests are {every}; they must be at least 0, where all arrive at once."
        )
    if rate is not None and not (rate > 0 and math.isfinite(rate)):
        raise ConfigError(f"The rate is {rate}; it must be above 0, the mean number of arrivals per step.")
    rng = random.Random(f"arrivals {seed}")
    gaps = [float(every) if rate is None else rng.expovariate(rate) for _ in range(num_requests - 1)]
    moments = [*accumulate(gaps, initial=0.0)]
    if moments[-1] > MAX_STEPS:
        raise ConfigError(
            f"The last request would arrive before step {moments[-1]:.0f}; a timeline has room for {MAX_STEPS} steps: "
            "use shorter intervals or fewer requests."
        )
    return [int(moment) for moment in moments]


def run(recorder: Recorder, arrivals: Sequence[Arrival]) -> None:
    """Add the requests to the recorder's engine, each before its step, and run steps until every request has finished.

    Raises:
        RequestError: a request is invalid for the engine.
        ConfigError: the requests would take more steps than a timeline can show.
    """
    places = recorder.engine.config.max_batch_size
    least = max(arrivals[-1].step, sum(arrival.params.max_new_tokens for arrival in arrivals) // places)
    if least > MAX_STEPS:
        raise ConfigError(
            f"{len(arrivals)} requests would take at least {least} steps with {places} at a time; a timeline has room "
            f"for {MAX_STEPS}: use shorter outputs or fewer requests."
        )
    coming = deque(arrivals)
    while coming or recorder.engine.has_work():
        while coming and coming[0].step <= len(recorder.steps):
            each = coming.popleft()
            recorder.add_request(each.prompt_ids, each.params, each.request_id, each.text, each.segments)
        recorder.step()


def _log_uniform(rng: random.Random, least: int, most: int) -> int:
    return round(math.exp(rng.uniform(math.log(least), math.log(most))))

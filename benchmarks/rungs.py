"""The rungs of the ladder: the quantity that each phase is about, and the workload that shows it. Introduced in phase
3.

A rung measures two engines with the same call: one of its phase, and one of the phase's predecessor. A count
(`is_timed` False) is exact. If a phase makes only a GPU faster, a rung on a CPU counts what the phase changes.
Invariant: a measurement leaves no request in the engine, and the same ``pair`` gives both engines the same prompts.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.decoding import Decoding, decoding, drain, first_token
from benchmarks.roofline import weight_bytes
from benchmarks.serving.engine_load import OneAtATime
from benchmarks.setup import Setup
from benchmarks.speculation import TASKS
from benchmarks.timing import SyntheticPrompts, answer_with, run
from benchmarks.view import count, number, quantity
from shared.attention.descriptor import Grid
from shared.attention.plan import plan_decode
from shared.engine.warm_up import warm_up
from shared.errors import ModelFolderError
from shared.grammar.grammar import Grammar
from shared.kernels.attention.planned_tiling import decode_tiling
from shared.lessons import find_lesson
from shared.sampling.params import SamplingParams
from shared.text.chat import ChatMessage, choose_template, encode_chat
from shared.tracks.ranks.shard import possible_sizes

REGIONS, REGION_TOKENS, MOST_REQUESTS, BATCH = 4, 256, 32, 16
"""The KV cache of an engine that serves many requests: so many regions of so many tokens, or the same bytes in blocks
for at most so many requests. Batches themselves are measured with ``BATCH`` regions."""
CHUNK = 48  # tokens of a chunk, where a phase has them
ANSWER, LONG_PROMPT, DOCUMENTS, LONG_ANSWER = 8, 240, 4, 32
LENGTHS, MULTIPROCESSORS = (4096, 64, 64, 64), 132
"""For the plan that is examined: the tokens of its requests, and the size of the GPU that it is for, an H100."""
ADAPTERS = Path(__file__).resolve().parents[1] / "adapters"
EDIT, STORY = TASKS["edit"], TASKS["story"]
PERSON = Grammar.json_schema(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 40}, "born": {"type": "integer"}},
        "required": ["name", "born"],
        "additionalProperties": False,
    }
)
QUESTIONS = tuple(
    f'Who {what}? Answer as JSON, with the keys "name", a string, and "born", a year.'
    for what in ("wrote the first program", "discovered radium", "painted Guernica")
)
"""Each asks for a person, as data that a program can read."""


@dataclass(frozen=True)
class Side:
    """One of the two engines: a phase, and settings in addition to those that all rungs share."""

    phase: str
    settings: tuple[tuple[str, Any], ...] = ()
    has_adapter: bool = False  # the one that the repository has for the model
    num_regions: int = REGIONS

    def load(self, setup: Setup) -> Any:
        """The engine, warmed up. Raises ConfigError for settings that the model's shape excludes."""
        lesson = find_lesson(self.phase)
        settings = dict(self.settings) | ({"adapter": str(adapter_of(setup))} if self.has_adapter else {})
        longest = min(REGION_TOKENS, setup.shape.max_position_embeddings)
        config = replace(setup.config(max_seq_len=longest), **settings)
        if "prefill_chunk_size" in lesson.load("engine").SUPPORTED:
            config = replace(config, prefill_chunk_size=CHUNK)
        engine = lesson.engine_within(config, self.num_regions, MOST_REQUESTS)
        if hasattr(engine, "step"):
            warm_up(engine)
        run(engine, [1] * ANSWER, 2)
        return engine


def side(phase: str, **settings: Any) -> Side:
    """A side, with settings by name."""
    return Side(phase, tuple(settings.items()))


def always(setup: Setup) -> bool:
    """A rung for any machine and model."""
    return True


def on_gpu(setup: Setup) -> bool:
    return setup.is_gpu


def on_cpu(setup: Setup) -> bool:
    return not setup.is_gpu


def adapter_of(setup: Setup) -> Path:
    """The folder of the adapter that was trained for the model."""
    return ADAPTERS / setup.folder.name


def has_adapter(setup: Setup) -> bool:
    return adapter_of(setup).is_dir()


def fewest_ranks(size: int, setup: Setup) -> bool:
    """Whether the model can be sharded over so many processes, and over no fewer; on a CPU."""
    return on_cpu(setup) and possible_sizes(setup.shape)[1:2] == [size]


def has_ranks(setup: Setup) -> bool:
    """Whether there are two GPUs over which the model can be sharded."""
    return setup.is_gpu and torch.cuda.device_count() > 1 and 2 in possible_sizes(setup.shape)


@dataclass(frozen=True)
class Rung:
    """One row of the ladder: ``name`` is its key in a report, and ``what`` the quantity with its workload and unit."""

    name: str
    what: str
    before: Side
    after: Side
    measure: Callable[[Any, int], float]
    is_timed: bool = True
    less_is_better: bool = False
    is_quick: bool = False  # a timed rung that is also part of the short ladder
    fits: Callable[[Setup], bool] = always
    form: Callable[[float], str] = number
    measure_before: Callable[[Any, int], float] | None = None  # if that is a different call

    def measured(self, engines: tuple[Any, Any], pair: int) -> tuple[float, float]:
        """Measures before and after; every second pair begins with the earlier phase."""
        calls = self.measure_before or self.measure, self.measure
        turns = (0, 1) if pair % 2 else (1, 0)
        values = {turn: calls[turn](engines[turn], pair) for turn in turns}
        return values[0], values[1]

    @property
    def phase(self) -> str:
        """The number of the phase that the rung is about."""
        return self.after.phase

    def gain(self, before: float, after: float) -> float | None:
        """How many times better the value is; None if one of the values is 0."""
        if not before or not after:
            return None
        return before / after if self.less_is_better else after / before


def draw(engine: Any, pair: int) -> SyntheticPrompts:
    """The prompts of a pair of measurements."""
    return SyntheticPrompts(engine.model.config.vocab_size, pair)


def one_request(engine: Any, pair: int) -> float:
    """Tokens per second of one answer, after its first token."""
    return run(engine, draw(engine, pair).draw(64), ANSWER + 1).decode_tokens_per_second


def edit(engine: Any, pair: int) -> float:
    """Tokens per second of an answer that repeats most of its prompt, after its first token."""
    return run(engine, chat(engine, EDIT), 3 * ANSWER).decode_tokens_per_second


def together(number: int, engine: Any, pair: int) -> float:
    """Tokens a second of so many requests that come at once, prompts included."""
    queue = engine if hasattr(engine, "step") else OneAtATime(engine)
    prompts, num_tokens = draw(engine, pair), 0
    started = time.perf_counter()
    for name in range(number):
        queue.add_request(prompts.draw(8), decoding(ANSWER), str(name))
    while queue.has_work():
        num_tokens += sum(output.token_id is not None for output in queue.step())
    return num_tokens / (time.perf_counter() - started)


def beside_an_answer(engine: Any, pair: int) -> float:
    """Milliseconds to the only token of a request that arrives when another has the first tokens of a long answer."""
    prompts = draw(engine, pair)
    writing = Decoding(engine, [(prompts.draw(8), decoding(LONG_ANSWER))])
    started = time.perf_counter()
    word = engine.add_request(prompts.draw(8), decoding(1))
    while not any(output.request_id == word for output in engine.step()):
        pass
    seconds = time.perf_counter() - started
    writing.end()
    return 1e3 * seconds


def matrix_products(engine: Any, pair: int) -> float:
    """The number of products with a weight for one more token of an answer."""
    counts = []
    for new_tokens in (2, 3):
        with Products() as products:
            run(engine, draw(engine, pair).draw(8), new_tokens)
        counts.append(products.number)
    return counts[1] - counts[0]


class Products(TorchDispatchMode):
    """Counts the products of matrices inside the block."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func in (torch.ops.aten.linear.default, torch.ops.aten.matmul.default)
        return func(*args, **(kwargs or {}))


def requests_at_once(engine: Any, pair: int) -> float:
    """The number of requests that run together, out of those that wait for the same KV cache."""
    prompts, most = draw(engine, pair), 0
    names = [engine.add_request(prompts.draw(REGION_TOKENS // 4 - 4), decoding(3)) for _ in range(20)]
    for _ in range(3):
        engine.step()
        most = max(most, engine.last_step.num_running)
    for name in names:
        engine.abort(name)
    drain(engine)
    return most


def longest_sequence(engine: Any, pair: int) -> float:
    """The maximum number of keys that one program of a GPU reads when requests of `LENGTHS` decode, without a plan."""
    return max(LENGTHS)


def longest_split(engine: Any, pair: int) -> float:
    """The same, as planned for a GPU."""
    config, itemsize = engine.model.config, engine.model.dtype.itemsize
    tiling = decode_tiling(len(LENGTHS), config.num_kv_heads, config.head_dim, itemsize)
    programs = tiling.programs_per_multiprocessor * MULTIPROCESSORS // config.num_kv_heads
    plan = plan_decode(LENGTHS, Grid(programs, tiling.tile, max(tiling.least_split, tiling.tile)))
    return min(max(LENGTHS), int(plan.split_size[0]))


def longest_wait(engine: Any, pair: int) -> float:
    """The maximum milliseconds between two tokens of three requests that decode while a long prompt is computed."""
    prompts = draw(engine, pair)
    decoders = Decoding(engine, [(prompts.draw(8), decoding(32)) for _ in range(3)])
    late = engine.add_request(prompts.draw(LONG_PROMPT), decoding(1))
    moments, is_over = [time.perf_counter()], False
    while not is_over:
        outputs = engine.step()
        is_over = any(output.request_id == late for output in outputs)
        if any(output.request_id in decoders.names for output in outputs):
            moments.append(time.perf_counter())
    decoders.end()
    return 1e3 * max(after - before for before, after in pairwise(moments))


def second_turn(engine: Any, pair: int) -> float:
    """Milliseconds to the first token of a conversation's second turn."""
    prompts = draw(engine, pair)
    first = prompts.draw(LONG_PROMPT - 32)
    first_token(engine, first)
    return 1e3 * first_token(engine, first + prompts.draw(8))


def planned_ahead(engine: Any, pair: int) -> float:
    """The number of steps of one request that are planned while the previous step runs."""
    schedule, number = engine.scheduler.schedule, 0

    def watched() -> Any:
        nonlocal number
        number += getattr(engine, "in_flight", None) is not None
        return schedule()

    engine.scheduler.schedule = watched
    try:
        run(engine, draw(engine, pair).draw(8), 16)
    finally:
        del engine.scheduler.schedule
    return number


def after_documents(engine: Any, pair: int) -> float:
    """Milliseconds to the first token of a question after documents, which are segments if the engine has them."""
    prompts = draw(engine, 0)
    documents = [prompts.draw(64) for _ in range(DOCUMENTS)]
    question = draw(engine, pair).draw(16)
    if not hasattr(engine, "register"):
        return 1e3 * first_token(engine, [token_id for each in documents for token_id in each] + question)
    names = [engine.register(each) for each in documents]
    drain(engine)
    return 1e3 * first_token(engine, question, None, names)


def blocks_held(engine: Any, pair: int) -> float:
    """The maximum number of KV cache blocks that one request holds in the second half of a long answer."""
    held = []
    engine.add_request(draw(engine, pair).draw(128), decoding(LONG_ANSWER))
    while engine.has_work():
        engine.step()
        held.append(sum(map(len, engine.pool.holdings()[1].values())))
    return max(held[len(held) // 2 :])


def bytes_of_weights(engine: Any, pair: int) -> float:
    """Bytes of the weights as they are stored in this process's memory."""
    return weight_bytes(engine.model)


def tokens_a_step(text: str, engine: Any, pair: int) -> float:
    """Tokens of an answer to a text after its first, divided by the forward passes that made them."""
    counts = list[int]()

    def on_token(token_id: int) -> bool:
        is_launched = getattr(engine, "in_flight", None) is not None  # the next step, whose token has yet to arrive
        counts.append(engine.stats()["forward passes"] - is_launched)
        return True

    answer_with(engine, chat(engine, text), 4 * ANSWER, on_token)
    return (len(counts) - 1) / (counts[-1] - counts[0])


def readable(engine: Any, pair: int) -> float:
    """Answers to `QUESTIONS` that a program can read; with a grammar if the engine supports them."""
    grammar = PERSON if hasattr(engine, "constraints") else None
    params = SamplingParams(temperature=0.0, max_new_tokens=40, structured_output=grammar)
    texts = {engine.add_request(chat(engine, question), params): "" for question in QUESTIONS}
    while engine.has_work():
        for output in engine.step():
            texts[output.request_id] += output.text
    return sum(map(is_person, texts.values()))


def is_person(text: str) -> bool:
    """Whether a program can read the answer: JSON with the two keys, and values of their types."""
    try:
        found = json.loads(text)
    except ValueError:
        return False
    is_object = isinstance(found, dict) and found.keys() == {"name", "born"}
    return is_object and isinstance(found["name"], str) and type(found["born"]) is int


def chat(engine: Any, text: str) -> list[int]:
    """The last ids of a question, with enough space left for an answer; without a chat format, those of its text."""
    try:
        template = choose_template(engine.model.config.family, engine.tokenizer)
    except ModelFolderError:
        ids: list[int] = engine.tokenizer.encode(text)
    else:
        ids = encode_chat(engine.tokenizer, [ChatMessage("user", text)], template=template)
    return ids[-(REGION_TOKENS - 6 * ANSWER) :]


def whole(value: float) -> str:
    """A count, formatted for readers."""
    return count(round(value))


STATIC, CONTINUOUS = Side("04", num_regions=BATCH), Side("05", num_regions=BATCH)
PLAIN, DRAFTED = side("10"), side("11", use_speculative_decoding=True, drafter="ngram")
FORGETFUL = side(
    "09.2", compress_method="snapkv", layer_budget=40, layer_upper_budget=48, steps_between_compressions=16
)
FOUR_BITS = side("10", quantization="int4")
GUESSED = Side("11.1", (("use_speculative_decoding", True),), has_adapter=True)
FRESH = {"max_seq_len": 512, "use_prefix_caching": False}  # documents in an order that has not been seen before
OVERLAPPED = side("09", overlap_scheduling=True)
RANKS = {size: side("12.1", tensor_parallel_size=size) for size in (2, 3)}

counted = partial(Rung, is_timed=False, form=whole)
fewer = partial(counted, less_is_better=True)
in_bytes = partial(fewer, form=partial(quantity, unit="B"))
sooner = partial(Rung, less_is_better=True)
"""Rungs with a count, of which more or less is better, with a size, and with a time."""

RUNGS = (
    Rung("03", "one request, tokens/s", side("02"), side("03"), one_request, is_quick=True),
    Rung("03.1", "one request, tokens/s", side("03"), side("03.1"), one_request, fits=on_gpu),
    fewer("03.1", "matrix products of a token", side("03"), side("03.1"), matrix_products, fits=on_cpu),
    Rung(
        "04",
        f"{BATCH} requests at a time, tokens/s",
        side("03.1"),
        STATIC,
        partial(together, BATCH),
        measure_before=partial(together, REGIONS),  # in turn: the first few, as the others would take as long again
        is_quick=True,
    ),
    sooner(
        "05", f"first token beside an answer of {LONG_ANSWER}, ms", STATIC, CONTINUOUS, beside_an_answer, is_quick=True
    ),
    counted("06", f"requests in the memory of {REGIONS} regions", side("05"), side("06"), requests_at_once),
    fewer(
        "06.1",
        "keys that the busiest program reads",
        side("06"),
        side("06.1"),
        longest_split,
        measure_before=longest_sequence,
    ),
    sooner("07", f"longest wait beside a prompt of {LONG_PROMPT}, ms", side("06.1"), side("07"), longest_wait),
    sooner("08", "first token of a second turn, ms", side("07"), side("08"), second_turn, is_quick=True),
    Rung("09", "one request, tokens/s", side("08"), side("09"), one_request, fits=on_gpu),
    counted("09", "steps planned while one runs, of 16", side("08"), OVERLAPPED, planned_ahead, fits=on_cpu),
    sooner(
        "09.1",
        f"first token after {DOCUMENTS} documents, ms",
        side("09", **FRESH),
        side("09.1", **FRESH),
        after_documents,
    ),
    fewer("09.2", f"KV blocks of an answer of {LONG_ANSWER} tokens", side("09"), FORGETFUL, blocks_held),
    in_bytes("10_bytes", "bytes of the weights, 4 bits", side("09"), FOUR_BITS, bytes_of_weights),
    Rung("10", "one request, 4 bits, tokens/s", side("09"), FOUR_BITS, one_request),
    Rung("11_tokens", "an edit, tokens a step", PLAIN, DRAFTED, partial(tokens_a_step, EDIT), is_timed=False),
    Rung("11", "an edit, tokens/s", PLAIN, DRAFTED, edit),
    Rung(
        "11.1",
        "a story, tokens a step",
        side("11"),
        GUESSED,
        partial(tokens_a_step, STORY),
        is_timed=False,
        fits=has_adapter,
    ),
    counted("12", f"answers that parse, of {len(QUESTIONS)}", side("11"), side("12"), readable),
    Rung("12.1", "one request, 2 GPUs, tokens/s", side("12"), RANKS[2], one_request, fits=has_ranks),
    *(
        in_bytes(
            "12.1",
            f"bytes of the weights, of each of {size} processes",
            side("12"),
            ranks,
            bytes_of_weights,
            fits=partial(fewest_ranks, size),
        )
        for size, ranks in RANKS.items()
    ),
)
"""In the order of the phases."""

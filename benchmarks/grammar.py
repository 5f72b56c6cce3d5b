"""What grammars cost: the mask kernels alone, and an engine whose requests have grammars compared with one whose
requests have none. Introduced in phase 12.

Invariants: masks are compared with those of the CPU before they are timed; compared runs are interleaved in one
process, and a ratio is the median of the ratios of single turns.
"""

import itertools
import random
import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.decoding import WARM, Decoding, decoding
from benchmarks.report import Report, rounded
from benchmarks.setup import Setup
from benchmarks.timing import SyntheticPrompts, cache_bytes, in_turns, num_input_sets, time_calls
from benchmarks.view import View, table_of, times
from shared.checkpoints.byte_tokenizer import pseudo_words
from shared.grammar.automata.automaton import Configuration
from shared.grammar.grammar import Grammar
from shared.grammar.limits import Limits
from shared.grammar.tokens.device import GrammarTokens, pack_row
from shared.grammar.tokens.fsm import TokenFSM
from shared.grammar.tokens.pool import GrammarPool, pack
from shared.grammar.tokens.vocabulary import GrammarVocabulary
from shared.kernels.sampling.grammar_advance import grammar_advance
from shared.kernels.sampling.grammar_mask import grammar_mask, remove_refused
from shared.lessons import find_lesson

NAMES = ("identifier", "description", "created_at", "coordinates", "recommendations", "unit", "is_available")
ITEM = {
    "type": "object",
    "properties": {
        "identifier": {"type": "integer", "minimum": 1},
        "description": {"type": "string", "minLength": 3, "maxLength": 60},
        "created_at": {"type": "string", "format": "date-time"},
        "coordinates": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
        "recommendations": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
        "unit": {"enum": ["metre", "foot", "mile", None]},
        "is_available": {"type": "boolean"},
    },
    "required": list(NAMES[:4]),
    "additionalProperties": False,
}
TREE = {"$ref": "#/$defs/node", "$defs": {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}}}}
LONG: list[Grammar] = [  # none of which ends within a few hundred tokens
    Grammar.json_schema({"type": "array", "items": ITEM, "minItems": 120}),
    Grammar.json_schema({"type": "array", "items": {"type": "integer"}, "minItems": 1000}),
    Grammar.json_schema({"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 600}),
    Grammar.json_schema({"type": "array", "items": {"type": "string", "format": "date"}, "minItems": 300}),
    Grammar.json_schema({"type": "string", "minLength": 4000}),
    Grammar.regex(r"([A-Z][a-z ]{10,40}\.\n){80,}"),
]
SHORT: list[Grammar] = [
    *(Grammar.json_schema(schema) for schema in (ITEM, TREE, {"type": "object", "additionalProperties": ITEM})),
    Grammar.json_schema({"anyOf": [ITEM, {"type": "object", "properties": {"error": {"type": "string"}}}]}),
    Grammar.json_schema({"type": "object", "patternProperties": {"^x-[a-z]+$": {"type": "integer"}}}),
    Grammar.json_object(),
    Grammar.regex(r"[\w.+-]{1,64}@[\w-]+(\.[\w-]+)+"),
    Grammar.regex(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(\.\d+)?(Z|[+-]\d{2}:\d{2})"),
    Grammar.choice([f"{name} {number}" for name in NAMES for number in range(40)]),
]
DOCUMENT = (
    '{"name": "Alice in Wonderland", "list": [1, 2.5e3, [3, 4, {"a": "b c d"}]], "text": "The quick \\" over", "ok": 1}'
)
SCRIPTS = ((0x430, 0x44F), (0x4E00, 0x5FFF), (0x3041, 0x3096), (0xAC00, 0xB800), (0x621, 0x64A), (0x905, 0x939))
MARKS = ('"', "'", ",", ":", "{", "}", "[", "]", "\\", "\n", "\t", " ", "  ", "(", ")", ";", "=", "<", ">", "/")
BATCHES = {"one": 1, "mixed 64": 64, "worst 64": 64, "mixed 64 x 5": 320}
CASES = {"free": 0.0, "half": 0.5, "all": 1.0}
"""For the engine: the share of the requests that have a grammar."""
CONTEXT = 64
NUM_ALONE = 48
"""Configurations that are timed individually, one of which is the worst."""


def made_vocabulary(size: int, seed: int) -> GrammarVocabulary:
    """Tokens like those of a real vocabulary: bytes, words with and without a space, six scripts, runs of marks."""
    chance, words = random.Random(seed), pseudo_words()
    tokens = dict.fromkeys(bytes([byte]) for byte in range(256))
    while len(tokens) < size - 1:
        kind = chance.random()
        if kind < 0.3:
            script = chance.choice(SCRIPTS)
            piece = "".join(chr(chance.randint(*script)) for _ in range(chance.randint(1, 5)))
        elif kind < 0.33:
            piece = "".join(chance.choices(MARKS, k=chance.randint(2, 6)))
        else:
            piece = chance.choice(("", " ")) + next(words)
        cut = -1 if kind < 0.01 else None  # in the middle of a character
        tokens[piece.encode()[:cut]] = None
    found = list(tokens)[: size - 1]
    return GrammarVocabulary.of_tokens([*found, b""], [size - 1])


def configurations(fsm: TokenFSM, chance: random.Random, count: int) -> Iterator[tuple[Configuration, int]]:
    """Positions in random outputs of a grammar, and in a document if it belongs to the grammar, with the token sampled
    at each.

    The id of a byte's token is the byte.
    """
    now: Configuration | None = fsm.initial_state
    for byte in DOCUMENT.encode():
        if now is not None and (following := fsm.next_state(now, byte)) is not None:
            yield now, byte
            now = following
    now = None
    for _ in range(count):
        now = fsm.initial_state if now is None else now
        token_id = int(chance.choice(np.flatnonzero(fsm.mask(now))))
        yield now, token_id
        now = fsm.next_state(now, token_id)


def measure_kernels(vocab_size: int, device: torch.device, seed: int, num_checks: int = 100) -> dict[str, Any]:
    """Microseconds of each launch, and how many masks were compared with the CPU's; raises if one differs."""
    chance, vocabulary = random.Random(seed), made_vocabulary(vocab_size, seed)
    compiled = [grammar.compiled(vocabulary.usable_bytes, Limits()) for grammar in (*LONG, *SHORT)]
    fsms = [TokenFSM(grammar.automaton, vocabulary) for grammar in compiled if grammar.automaton is not None]
    pool = GrammarPool(64_000_000, device)
    bases = [pool.acquire(n, pack(fsm.automaton, vocabulary.usable_bytes)) for n, fsm in enumerate(fsms)]
    tokens = GrammarTokens.of(vocabulary, device)
    grammars = {base: fsm for base, fsm in zip(bases, fsms, strict=True) if base is not None}
    found = [(base, *each) for base, fsm in grammars.items() for each in configurations(fsm, chance, 12)]
    packed = np.stack([pack_row(base, now) for base, now, _ in found])
    known = torch.from_numpy(packed).to(device)
    logits_set = num_input_sets(vocab_size * 2, cache_bytes(device))
    logits = torch.zeros(max(logits_set, max(BATCHES.values())), vocab_size, dtype=torch.bfloat16, device=device)

    def sets(batches: Sequence[Sequence[int]]) -> list[tuple[torch.Tensor, ...]]:
        """Batches in turn: rows, slots, words, logit indices, and the logits, adjacent within a set."""
        size, made = len(batches[0]), list[tuple[torch.Tensor, ...]]()
        for n in range(max(len(logits) // size, len(batches))):
            rows = known[torch.tensor(batches[n % len(batches)], device=device)]
            words = torch.zeros(size, tokens.num_words, dtype=torch.int32, device=device)
            first = n * size % (len(logits) - size + 1)
            numbers = torch.arange(size, dtype=torch.int32, device=device)
            made.append((rows, numbers, words, numbers, logits[first : first + size]))
        return made

    def mask(rows: torch.Tensor, slots: torch.Tensor, words: torch.Tensor, *_: torch.Tensor) -> None:
        grammar_mask(pool.tables, tokens, rows, slots, words, grammars)

    def advance(rows: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, ids: torch.Tensor) -> None:
        grammar_advance(pool.tables, tokens, rows, sources, targets, ids, grammars)

    def remove(_: Any, slots: torch.Tensor, words: torch.Tensor, numbers: torch.Tensor, own: torch.Tensor) -> None:
        remove_refused(words, slots, numbers, tokens, own)

    chosen = chance.sample(range(len(found)), min(num_checks, len(found)))
    own_set = sets([chosen])[0]
    mask(*own_set)
    remove(*own_set)
    own = own_set[-1]
    for number, place in enumerate(chosen):
        base, now, _ = found[place]
        if not ((own[number] == 0).cpu().numpy() == grammars[base].mask(now)).all():
            raise RuntimeError(f"The mask of grammar {base} at {now} differs from the CPU's.")
    logits.zero_()
    timed = chosen[:NUM_ALONE]
    alone = [1e6 * time_calls(mask, sets([[place]])[:16]) for place in timed]
    worst = timed[int(np.argmax(alone))]
    mixed = [[chance.randrange(len(found)) for _ in range(BATCHES["mixed 64 x 5"])] for _ in range(4)]
    batches = {"one": [[place] for place in chosen], "worst 64": [[worst] * 64], "mixed 64 x 5": mixed}
    batches["mixed 64"] = [batch[:64] for batch in mixed]
    result: dict[str, Any] = {"compared": len(chosen), "grammars": len(fsms), "configurations": len(found), "us": {}}
    for name in BATCHES:
        own_sets = sets(batches[name])
        for own_set in own_sets:
            mask(*own_set)
        drawn = torch.tensor([token_id for *_, token_id in found], device=device)
        moved = [
            (torch.cat([rows, rows]), slots, slots + len(slots), drawn[torch.tensor(batch, device=device)])
            for (rows, slots, *_), batch in zip(own_sets, itertools.cycle(batches[name]))
        ]
        result["us"][name] = {
            "mask": rounded(1e6 * time_calls(mask, own_sets)),
            "remove": rounded(1e6 * time_calls(remove, own_sets)),
            "advance": rounded(1e6 * time_calls(advance, moved)),
        }
    return result


def decode(engine: Any, share: float, num_requests: int, num_steps: int, prompts: SyntheticPrompts) -> float:
    """Tokens per second of ``num_requests`` decoding requests, a share of which have a grammar, by the median step."""
    requests = []
    for n in range(num_requests):
        has_grammar = (n + 1) * share // 1 > n * share // 1
        grammar = LONG[n % len(LONG)] if has_grammar else None
        params = decoding(num_steps + 3 * WARM, ignore_eos=not has_grammar, structured_output=grammar)
        requests.append((prompts.draw(CONTEXT), params))
    together = Decoding(engine, requests)
    seconds, num_tokens = together.steps(num_steps)
    together.end()
    return num_tokens / (num_steps * statistics.median(seconds))


def measure_engine(
    engines: dict[str, Any], num_requests: int, num_steps: int, trials: int, seed: int
) -> dict[str, dict[str, Any]]:
    """The speed of each case, and its median share of the speed of free requests in the same turn."""
    prompts = SyntheticPrompts(next(iter(engines.values())).model.config.vocab_size - 300, seed)
    calls = {
        f"{name} {case}": partial(decode, engine, share, num_requests, num_steps, prompts)
        for name, engine in engines.items()
        for case, share in CASES.items()
        if name == "12" or case == "free"
    }
    speeds = in_turns(calls, trials, warm_ups=1)
    return {
        case: {
            "tokens_per_second": rounded(statistics.median(found)),
            "over_free": rounded(statistics.median(np.divide(found, speeds["12 free"]).tolist())),
            "all": [rounded(speed) for speed in found],
        }
        for case, found in speeds.items()
    }


def measure_grammars(
    model: str, *, device: str, num_requests: int = 64, num_steps: int = 150, trials: int = 5, seed: int = 0
) -> Report:
    """Kernels, if any, and the engine of phase 12 compared with that of phase 11, which has no grammars."""
    setup, longest = Setup(model, device, seed=seed), CONTEXT + num_steps + 4 * WARM
    blocks = num_requests * (longest // 16 + 2)
    config = setup.config(max_batch_size=num_requests, max_seq_len=longest, num_gpu_blocks=blocks)
    engines = {phase: find_lesson(phase).engine(config) for phase in ("11", "12")}
    engines["12"].constraints.limits = Limits()  # even on a busy machine
    results: dict[str, Any] = {"engine": measure_engine(engines, num_requests, num_steps, trials, seed)}
    if setup.is_gpu:
        results["kernels"] = measure_kernels(setup.shape.vocab_size, engines["12"].model.device, seed)
    flags = {"requests": num_requests, "steps": num_steps, "trials": trials}
    return setup.report("grammar", {phase: engine.config for phase, engine in engines.items()}, flags, results)


def view(report: Report) -> View:
    """A table for the engine, and one for the kernels."""
    rows, first = report.results["engine"], "phase, requests with a grammar"
    tables = [table_of(f"{report.flags['requests']} requests", first, rows, over_free=times)]
    if "kernels" in report.results:
        tables.append(table_of("µs of a launch", "rows", report.results["kernels"]["us"]))
    return View(f"Grammars: {report.model['name']}", [report.machine_title], tables)

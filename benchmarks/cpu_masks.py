"""Masks of grammars on a CPU, compared with those of llguidance and xgrammar if these are installed. Introduced in
phase 12.

    python -m benchmarks.cpu_masks --tokenizer FOLDER --schemas FILE --out FOLDER

The file has one JSON object per line: ``name``, ``schema``, and ``tests``, each with ``valid`` and ``data``, like
MaskBench's data (arXiv 2501.10868). Each document is checked token by token; masks are timed along the valid ones.

Invariants: contenders take turns on each schema in one single-threaded process. Each document of each pass begins with
an empty cache, and a position's time is that of its fastest pass. Only positions that all contenders reached count.
"""

import importlib
import importlib.metadata
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.command import run
from benchmarks.report import Report, rounded
from benchmarks.timing import rotated
from benchmarks.view import Column, Table, View, count
from shared.grammar.automata.automaton import Automaton, Configuration
from shared.grammar.grammar import Grammar
from shared.grammar.limits import GrammarError, Limits
from shared.grammar.tokens.fsm import TokenFSM
from shared.grammar.tokens.vocabulary import GrammarVocabulary
from shared.text.tokenizer import Tokenizer

OURS = "infer"


class Matcher(Protocol):
    """One output of a grammar."""

    def mask(self) -> Any:
        """Compute the tokens that may follow."""

    def advance(self, token_id: int) -> bool:
        """Take a token; False if the grammar refuses it."""

    def is_end(self) -> bool:
        """Whether the output may end here."""


Begin = Callable[[], Matcher]
"""A new output of a compiled grammar, with nothing cached from earlier outputs if that is possible."""
Compile = Callable[[Any], Begin]
"""The contender's grammar of a schema; raises GrammarError, ValueError or RuntimeError if the schema is refused."""


class OurMatcher:
    def __init__(self, automaton: Automaton, vocabulary: GrammarVocabulary) -> None:
        self.fsm = TokenFSM(automaton, vocabulary)
        self.fsm.masks = type(self.fsm.masks)(automaton, vocabulary)  # without the mask that the constructor asks for
        self.now: Configuration = self.fsm.initial_state

    def mask(self) -> Any:
        return self.fsm.mask(self.now)

    def advance(self, token_id: int) -> bool:
        after = self.fsm.next_state(self.now, token_id)
        self.now = after or self.now
        return after is not None

    def is_end(self) -> bool:
        return self.fsm.is_terminal(self.now)


def ours(vocabulary: GrammarVocabulary, folder: Path) -> Compile:
    _ = vocabulary.plain, vocabulary.longest_digits

    def compiled(schema: Any) -> Begin:
        automaton = Grammar.json_schema(schema).compiled(vocabulary.usable_bytes, Limits()).automaton
        assert automaton is not None
        return lambda: OurMatcher(automaton, vocabulary)

    return compiled


class LLGuidanceMatcher:
    def __init__(self, library: Any, tokenizer: Any, grammar: str) -> None:
        self.fill = library.numpy.fill_next_token_bitmask
        self.matcher = library.LLMatcher(tokenizer, grammar)
        if self.matcher.is_error():
            raise ValueError(self.matcher.get_error())
        self.words = library.numpy.allocate_token_bitmask(1, tokenizer.vocab_size)

    def mask(self) -> Any:
        self.fill(self.matcher, self.words)

    def advance(self, token_id: int) -> bool:
        return bool(self.matcher.consume_token(token_id))

    def is_end(self) -> bool:
        return bool(self.matcher.is_accepting())


def llguidance(vocabulary: GrammarVocabulary, folder: Path) -> Compile:
    library = importlib.import_module("llguidance")
    importlib.import_module("llguidance.numpy")
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    tokenizer = library.LLTokenizer(text, n_vocab=len(vocabulary), eos_token=vocabulary.end_ids[0])

    def compiled(schema: Any) -> Begin:
        grammar = library.LLMatcher.grammar_from_json_schema(schema)
        LLGuidanceMatcher(library, tokenizer, grammar)  # raises an error for grammars that it refuses
        return lambda: LLGuidanceMatcher(library, tokenizer, grammar)

    return compiled


class XGrammarMatcher:
    def __init__(self, library: Any, grammar: Any, num_tokens: int) -> None:
        self.matcher = library.GrammarMatcher(grammar, terminate_without_stop_token=True)
        self.words = library.allocate_token_bitmask(1, num_tokens)

    def mask(self) -> Any:
        self.matcher.fill_next_token_bitmask(self.words)

    def advance(self, token_id: int) -> bool:
        return bool(self.matcher.accept_token(token_id))

    def is_end(self) -> bool:
        return bool(self.matcher.is_terminated())


def xgrammar(vocabulary: GrammarVocabulary, folder: Path) -> Compile:
    library = importlib.import_module("xgrammar")
    info = library.TokenizerInfo(
        list(vocabulary.tokens),
        library.VocabType.RAW,
        vocab_size=len(vocabulary),
        stop_token_ids=list(vocabulary.end_ids),
    )
    compiler = library.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compiled(schema: Any) -> Begin:
        grammar = compiler.compile_json_schema(json.dumps(schema), strict_mode=False)
        return lambda: XGrammarMatcher(library, grammar, len(vocabulary))

    return compiled


LIBRARIES: dict[str, Callable[[GrammarVocabulary, Path], Compile]] = {
    OURS: ours,
    "llguidance": llguidance,
    "xgrammar": xgrammar,
}


@dataclass
class Findings:
    """One contender's results: times in seconds; by schema and document, the fastest time of each position."""

    compile_times: list[float] = field(default_factory=list)
    refused: int = 0
    right: int = 0
    accepted_wrongly: int = 0
    refused_wrongly: int = 0
    times: dict[tuple[int, int], np.ndarray[Any, Any]] = field(default_factory=dict)


def walk(begin: Begin, token_ids: list[int]) -> tuple[bool, list[float]]:
    """Whether a document is accepted, and the seconds of each mask along the way."""
    matcher, seconds = begin(), []
    for token_id in token_ids:
        started = time.perf_counter()
        matcher.mask()
        seconds.append(time.perf_counter() - started)
        if not matcher.advance(token_id):
            return False, seconds
    return matcher.is_end(), seconds


def measure_masks(tokenizer: str, schemas: str, *, every: int = 9, passes: int = 8, seed: int = 0) -> Report:
    """Every n-th schema of a file, with its documents, which each contender walks in several passes."""
    folder, found = Path(tokenizer), dict[str, Findings]()
    texts = Tokenizer.load(folder)
    vocabulary = GrammarVocabulary.of(texts, texts.vocab_size)
    contenders, versions = {}, {}
    for name, load in LIBRARIES.items():
        try:
            contenders[name] = load(vocabulary, folder)
            versions[name] = "" if name == OURS else importlib.metadata.version(name)
        except ImportError:
            continue
        found[name] = Findings()
    samples = [json.loads(line) for line in Path(schemas).read_text(encoding="utf-8").splitlines()[::every]]
    for number, sample in enumerate(samples):
        begins: dict[str, Begin] = {}
        for name in rotated(tuple(contenders), number):
            started = time.perf_counter()
            try:
                begins[name] = contenders[name](sample["schema"])
            except (GrammarError, ValueError, RuntimeError):
                found[name].refused += 1
            else:
                found[name].compile_times.append(time.perf_counter() - started)
        documents = [json.dumps(test["data"], ensure_ascii=False) for test in sample["tests"]]
        token_ids = [texts.encode(document, add_special_tokens=False) for document in documents]
        wrong = dict.fromkeys(begins, 0)
        for trial in range(passes):
            for name in rotated(tuple(begins), trial) if begins else ():
                for place, test in enumerate(sample["tests"]):
                    if trial and not test["valid"]:
                        continue
                    is_accepted, seconds = walk(begins[name], token_ids[place])
                    one = found[name]
                    if not trial:
                        one.accepted_wrongly += is_accepted and not test["valid"]
                        one.refused_wrongly += not is_accepted and test["valid"]
                        wrong[name] += is_accepted != test["valid"]
                    if is_accepted and test["valid"]:
                        before = one.times.get((number, place), np.full(len(seconds), np.inf))
                        one.times[number, place] = np.minimum(before, seconds)
        for name, num_wrong in wrong.items():
            found[name].right += not num_wrong
    shared = set.intersection(*(set(one.times) for one in found.values()))
    results = {name: _figures(one, sorted(shared)) | {"version": versions[name]} for name, one in found.items()}
    flags = {"schemas": len(samples), "passes": passes}
    model = {"name": f"{folder.name} tokens", "vocab_size": len(vocabulary)}
    return Report("masks", model, {}, seed, flags, results)


def _figures(one: Findings, shared: list[tuple[int, int]]) -> dict[str, Any]:
    times = 1e6 * np.concatenate([one.times[key] for key in shared])
    compile_ms = [1e3 * seconds for seconds in one.compile_times]
    return {
        "refused": one.refused,
        "all_right": one.right,
        "accepted_wrongly": one.accepted_wrongly,
        "refused_wrongly": one.refused_wrongly,
        "compile_ms": rounded(statistics.median(compile_ms)),
        "compile_ms_max": rounded(max(compile_ms)),
        "masks": len(times),
        "mask_us_mean": rounded(float(times.mean())),
    } | {f"mask_us_p{share}": rounded(float(np.percentile(times, share))) for share in (50, 90, 99)}


def view(report: Report) -> View:
    """A row for each contender."""
    rows = [{"name": f"{name} {each['version']}".rstrip()} | each for name, each in report.results.items()]
    columns = [
        Column("", "name", str, is_text=True),
        *(Column(key.replace("_", " "), key, count) for key in ("refused", "all_right")),
        *(Column(key.replace("_", " "), key, count) for key in ("accepted_wrongly", "refused_wrongly")),
        Column("compile, ms: median", "compile_ms"),
        *(Column(f"mask, µs: {key}", f"mask_us_{key}") for key in ("mean", "p50", "p90", "p99")),
    ]
    num_masks = next(iter(report.results.values()))["masks"]
    said = f"{report.flags['schemas']} schemas; {num_masks:,} masks over {report.model['vocab_size']:,} tokens"
    return View("Masks on a CPU", [said, report.machine_title], [Table("", columns, rows)])


if __name__ == "__main__":
    run(measure_masks, view, __doc__)

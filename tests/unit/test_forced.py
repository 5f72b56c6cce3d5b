"""Text that a grammar forces, as drafts: what is forced, how it is spelled, what it saves."""

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phases.phase_12.engine import Engine
from shared.engine.config import EngineConfig
from shared.engine.request import Request, RequestStatus
from shared.grammar.automata.automaton import START, Automaton
from shared.grammar.grammar import Grammar, compile_grammar
from shared.sampling.params import SamplingParams
from shared.scheduling.schedule import Schedule, Scheduled
from shared.speculation.adaptive import DraftLengths
from shared.speculation.drafter import Drafter
from shared.speculation.forced import MOST_BYTES, ForcedText, ForcedTextDrafter
from tests.drafts import num_refused
from tests.grammar_walks import byte_classes, random_text
from tests.grammars import UNTIMED
from tests.mixed_requests import seen, serve
from tests.unit.test_constraint import END, A, B, C, begin

ALL_BYTES = np.ones(256, bool)
KEYS = {
    "type": "object",
    "properties": {
        "identification_number": {"type": "integer"},
        "registration": {"type": "string", "maxLength": 5},
        "availability_of_the_item": {"type": "boolean"},
    },
    "required": ["identification_number", "registration", "availability_of_the_item"],
    "additionalProperties": False,
}
SPECULATION: dict[str, Any] = {"use_speculative_decoding": True, "drafter": "ngram"}


def automaton_of(grammar: Grammar) -> Automaton:
    return compile_grammar(grammar, ALL_BYTES, UNTIMED)


def forced(automaton: Automaton, text: str) -> str:
    now = automaton.walk(START, text.encode())
    assert now is not None
    return ForcedText(automaton).after(now, text.encode()[-1] if text else 0).decode()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "{"),
        ("{", ""),  # a blank, or a key
        ('{"', ""),  # each of the keys
        ('{"i', 'dentification_number": '),
        ('{"identification_number":', " "),
        ('{"identification_number": 1', ""),  # another digit, or a comma
        ('{"registration": "abcde', ""),
        ('{"registration": "abcde"', ","),  # a key is missing
        ('{"registration": "a", "a', 'vailability_of_the_item": '),
        ('{"registration": "a", "availability_of_the_item": t', "rue,"),
        ('{"registration": "a", "availability_of_the_item": true, "', 'identification_number": '),
        ('{"registration": "a", "identification_number": 1, "availability_of_the_item": f', "alse"),
    ],
)
def test_what_a_schema_forces(text: str, expected: str) -> None:
    assert forced(automaton_of(Grammar.json_schema(KEYS)), text) == expected


def test_what_other_grammars_force() -> None:
    assert forced(automaton_of(Grammar.choice(["lighthouse", "lightning"])), "") == "light"
    assert forced(automaton_of(Grammar.choice(["light", "lightning"])), "") == "light", "it may end there"
    assert forced(automaton_of(Grammar.regex("é{3}b*")), "") == "ééé"
    assert len(forced(automaton_of(Grammar.regex("a{1000}")), "")) == MOST_BYTES


@settings(max_examples=40)
@given(number=st.integers(0, 3), seed=st.integers(0, 10_000))
def test_texts_go_on_as_forced(number: int, seed: int) -> None:
    """In a text without blanks, but for the space after a colon, each forced text is where it was forced."""
    grammar = (
        Grammar.json_schema(KEYS),
        Grammar.regex(r"(ab|cd)+xyz|(ef)*z"),
        Grammar.choice(["red", "green", "greenish"]),
        Grammar.json_schema({"type": "array", "items": {"enum": ["long", "longer", 5, None]}, "minItems": 2}),
    )[number]
    automaton = automaton_of(grammar)
    text = random_text(automaton, random.Random(seed), byte_classes(automaton))
    if number in (0, 3):
        text = json.dumps(json.loads(text), ensure_ascii=False, separators=(",", ": ")).encode()
        assert automaton.accepts(text)
    finder, now = ForcedText(automaton), START
    for place, byte in enumerate(text):
        follows = finder.after(now, text[place - 1] if place else 0)
        assert text[place:].startswith(follows[: len(text) - place])
        now = automaton.step(now, byte) or pytest.fail("the text is not one of the grammar")
    assert finder.after(now, text[-1]) == b""


def test_what_is_forced_follows_the_drafts_that_the_grammar_allows() -> None:
    """The other drafter proposes two wrong tokens; it is not asked where all drafts are forced."""
    _, request = begin("[ab][ab]ccc[ab]")
    vars(request).update(status=RequestStatus.RUNNING, last_token_id=END, num_forced_drafts=0, num_pending_tokens=1)
    asked: list[int] = []

    def propose(schedule: Schedule) -> None:
        for entry in schedule:
            asked.append(entry.num_drafts)
            if entry.num_drafts:
                entry.request.draft_ids = [A, B, B] if entry.request.status is RequestStatus.RUNNING else []

    inner: Any = SimpleNamespace(propose=propose, collect=lambda: None)
    tokenizer: Any = SimpleNamespace(
        token_bytes=(b"", b"a", b"b", b"c").__getitem__,
        encode=lambda text, add_special_tokens: [" abc".index(letter) for letter in text],
    )
    drafter = ForcedTextDrafter(inner, tokenizer)
    assert [drafter.spelled(text) for text in (b"ab\xffc", b"a\xc3")] == [(A, B), (A,)], "up to what is no text"
    for outputs, status, num_drafts, others, drafts, num_forced, left in (
        ([A], RequestStatus.RUNNING, 3, 3, [A, C, C], 2, [1]),
        ([A, A], RequestStatus.RUNNING, 3, 0, [C, C, C], 3, []),
        ([A, A], RequestStatus.RUNNING, 0, 0, [], 0, []),
        ([A, A], RequestStatus.FINISHED, 3, 3, [], 0, []),
    ):
        request.status, request.output_ids, request.draft_ids = status, outputs, []
        places = range(len(outputs), len(outputs) + others) if status is RequestStatus.RUNNING else ()
        inner.distributions = {(5, place): torch.ones(1) for place in places}
        schedule = Schedule(1, (Scheduled(request, 0, 1 + num_drafts, num_drafts, 1 + num_drafts),))
        drafter.propose(schedule)
        assert (asked[-1], request.draft_ids, request.num_forced_drafts) == (others, drafts, num_forced)
        assert [index for _, index in drafter.distributions] == left, "the drafts that were drawn"
    for outputs, status, asks, count in (
        ([A, A], RequestStatus.RUNNING, True, 3),
        ([A, A], RequestStatus.FINISHED, True, 0),
        ([A, A], RequestStatus.RUNNING, False, 0),
        ([], RequestStatus.RUNNING, True, 0),
    ):
        params = SamplingParams(use_speculative_decoding=asks)
        vars(request).update(status=status, output_ids=outputs, params=params, num_certain_drafts=0)
        drafter.observe(schedule)
        assert request.num_certain_drafts == count, "three are forced after the first two"
    vars(request).update(output_ids=[A, A], params=SamplingParams())
    drafter.propose(schedule)
    assert request.num_certain_drafts == 3, "of a prompt they are known before it is committed"


REQUESTS = [
    ([3 + n, 5, 9], options | {"structured_output": Grammar.json_schema(KEYS), "max_new_tokens": 90})
    for n, options in enumerate(
        ({"temperature": 0.0}, {"seed": 3}, {"seed": 4, "temperature": 2.0}, {"top_p": 0.8, "seed": 5})
    )
]


@pytest.mark.parametrize(
    ("family", "more"),
    [("llama", {}), ("qwen3", {"adapt_spec_length": False}), ("gemma3_text", {"overlap_scheduling": True})],
)
def test_forced_drafts_change_no_token_and_save_steps(
    tiny_checkpoints: dict[str, Path], family: str, more: dict[str, Any]
) -> None:
    """These vocabularies spell letters one by one, so that all forced drafts are right."""
    model_folder = tiny_checkpoints[family]
    options: dict[str, Any] = {"max_seq_len": 256, "max_batch_size": 4}
    plain = Engine(EngineConfig(str(model_folder), **options))
    answers = serve(plain, REQUESTS)[0]
    engine: Any = Engine(EngineConfig(str(model_folder), **options, **SPECULATION, **more, spec_length=8))
    refused, propose = list[int](), engine.drafter.propose

    def noting(schedule: Schedule) -> None:
        propose(schedule)
        refused.extend(num_refused(entry.request) for entry in schedule if entry.num_drafts)

    engine.drafter.propose = noting
    assert seen(serve(engine, REQUESTS)[0]) == seen(answers)
    assert sum(refused) == 0 < len(refused), "drafts that the grammar refuses"
    assert engine.drafter._spelled("aé".encode() + b"\xc3") == engine.drafter._spelled("aé".encode()) != ()
    stats = engine.stats()
    assert stats["forced drafts accepted (tokens)"] > 40
    assert engine.runner.num_forwards < 0.7 * plain.runner.num_forwards
    assert engine.pool.audit() == []


def test_rejection_accepts_what_is_forced(folder: Path) -> None:
    engine = Engine(EngineConfig(str(folder), max_seq_len=256, acceptance_method="rejection", **SPECULATION))
    answers = serve(engine, [(prompt, params | {"max_new_tokens": 200}) for prompt, params in REQUESTS])[0]
    assert engine.stats()["forced drafts accepted (tokens)"] > 40
    texts = ["".join(output.text for output in answer) for answer in answers if answer[-1].finish_reason == "stop"]
    assert all(json.loads(text).keys() == KEYS["properties"].keys() for text in texts)


def test_forced_drafts_say_nothing_about_others() -> None:
    request, lengths = Request("a", [1], SamplingParams(), 0), DraftLengths(5)
    lengths.next_lengths([request])
    before = lengths.known[request].rate
    request.num_forced_drafts = 3
    lengths.count(request, 3, 3)
    assert lengths.known[request].rate == before
    lengths.count(request, 5, 5)
    other = Request("b", [1], SamplingParams(), 0)
    lengths.count(other, 2, 2)
    assert lengths.known[request].rate == lengths.known[other].rate > before
    for _ in range(30):
        lengths.count(request, 5, 0)
    request.num_certain_drafts, request.num_pending_tokens = 5, 1
    assert lengths.next_lengths([request]) == [4], "what is certain needs no estimate"


def test_a_drafter_proposes_and_forced_text_forwards_all_that_a_drafter_does() -> None:
    assert Drafter.__abstractmethods__ == {"propose"}
    names = {name for name, member in vars(Drafter).items() if callable(member) or isinstance(member, property)}
    assert {name for name in names if not name.startswith("_")} <= vars(ForcedTextDrafter).keys()

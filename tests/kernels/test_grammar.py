"""The grammar kernels equal the scalar walk of the automaton, bit for bit: masks of rows, and rows after tokens."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shared.kernels.sampling.grammar_advance as advance_module
import shared.kernels.sampling.grammar_mask as mask_module
from shared.engine.sampling.grammar_rows import GrammarRows
from shared.grammar.automata.automaton import MAX_DEPTH, START
from shared.grammar.constraint import Constraint
from shared.grammar.documents.json_schema import compile_schema
from shared.grammar.grammar import Grammar
from shared.grammar.limits import GrammarError
from shared.grammar.tokens.device import KEPT, ROW, GrammarTokens, pack_row, unpack_row
from shared.grammar.tokens.fsm import TokenFSM
from shared.grammar.tokens.pool import GrammarPool, pack
from shared.grammar.tokens.vocabulary import GrammarVocabulary
from shared.kernels.launch import INTERPRETED
from shared.kernels.sampling.grammar_advance import grammar_advance
from shared.kernels.sampling.grammar_mask import grammar_mask, remove_refused
from shared.sampling.params import SamplingParams
from shared.sampling.sampler import SamplingRow
from shared.text.tokenizer import Tokenizer
from tests.grammars import ALPHABET, any_json, budget, random_automaton, random_tokens, random_walk
from tests.unit.test_automaton import nested, objects

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
if INTERPRETED:
    mask_module.NUM_GROUPS, mask_module.NUM_PROGRAMS = 16, 1  # the interpreter pays by the program


class Machine:
    """Grammars in a pool, and rows of configurations."""

    def __init__(self, vocabulary, automata):
        self.tokens = GrammarTokens.of(vocabulary, DEVICE)
        self.pool = GrammarPool(8_000_000, DEVICE)
        self.fsms = [TokenFSM(automaton, vocabulary) for automaton in automata]
        usable = vocabulary.usable_bytes
        self.bases = [self.pool.acquire(n, pack(fsm.automaton, usable)) for n, fsm in enumerate(self.fsms)]
        self.grammars = dict(zip(self.bases, self.fsms, strict=True))

    def rows(self, configurations):
        """Rows of (grammar, configuration), and one more before them that none uses."""
        packed = [pack_row(self.bases[number], now) for number, now in configurations]
        return torch.from_numpy(np.stack([np.full(ROW, 7, np.int32), *packed])).to(DEVICE)

    def check_masks(self, configurations, dtype=torch.float32):
        rows = self.rows(configurations)
        slots = torch.tensor([-1, *range(len(rows) - 1, 0, -1)], dtype=torch.int32, device=DEVICE)
        words = torch.full((len(slots), self.tokens.num_words), 7, dtype=torch.int32, device=DEVICE)
        grammar_mask(self.pool.tables, self.tokens, rows, slots, words, self.grammars)
        logits = torch.zeros(len(slots) + 1, len(self.tokens.ranks) + 3, dtype=dtype, device=DEVICE)
        numbers = torch.tensor([0, *range(2, len(slots) + 1)], dtype=torch.int32, device=DEVICE)
        remove_refused(words, slots, numbers, self.tokens, logits[:, :-3])
        assert (words[0] == 7).all()
        assert (logits[:2] == 0).all(), "a row without a grammar, and one without bits"
        assert (logits[:, -3:] == 0).all(), "columns beyond the vocabulary"
        for row, (number, now) in zip(logits[2:, :-3].cpu(), reversed(configurations), strict=True):
            allowed = self.fsms[number].allowed_tokens(now)
            assert (row == 0).nonzero()[:, 0].tolist() == allowed, now
            assert (row == -torch.inf).sum() == len(row) - len(allowed)

    def check_advance(self, configurations, chance, in_place):
        """One chain of three tokens from each configuration: allowed ones, and now and then one that is not."""
        chains, expected = [], []
        for number, now in configurations:
            fsm, chain, after = self.fsms[number], [], now
            for _ in range(3):
                allowed = fsm.allowed_tokens(after) if after else []
                is_wild = chance.random() < 0.1 or not allowed
                if allowed and chance.random() < 0.3:  # what opens most
                    allowed = [
                        max(allowed, key=lambda token_id: sum(map(fsm.vocabulary.tokens[token_id].count, b"[{")))
                    ]
                chain.append(chance.randrange(len(self.tokens.ranks)) if is_wild else chance.choice(allowed))
                if after is not None and self.tokens.ids[chain[-1], 1] > 0:
                    after = fsm.next_state(after, chain[-1])
                expected.append(after)
            chains.append(chain)
        rows = self.rows(configurations)
        count = len(configurations)
        sources = torch.arange(1, count + 1, dtype=torch.int32, device=DEVICE)
        ids = torch.tensor(chains, device=DEVICE)
        if in_place:
            for step in range(3):
                options = (self.pool.tables, self.tokens, rows, sources, sources)
                grammar_advance(*options, ids[:, step].contiguous(), self.grammars)
            found, expected = rows[1:], expected[2::3]
        else:
            rows = torch.cat([rows, torch.full((3 * count, ROW), 9, dtype=torch.int32, device=DEVICE)])
            targets = count + 1 + 3 * torch.arange(count, dtype=torch.int32, device=DEVICE)
            grammar_advance(self.pool.tables, self.tokens, rows, sources, targets, ids, self.grammars)
            found = rows[count + 1 :]
            assert (found[:, KEPT] == 0).all(), "the bits in their places are those of other rows"
        for row, after in zip(found.cpu().numpy(), expected, strict=True):
            base, now = unpack_row(row)
            assert (base >= 0) == (after is not None)
            assert after is None or now == after


def vocabulary_of(chance, *prefixes):
    """Random tokens; with ``prefixes``, each of these is that of all tokens in a group."""
    words = [b'"a', b'a"', b'"aa"', b"[[", b"]]", b"[[[", b'", "', b'": "', b"{a", b",b", b"a,c}", b"]}", b"\n  "]
    opened = b'{"b":{"a":{"b":"'  # four frames
    words += [
        b'[[["aa"]',
        opened,
        *(opened + text for text in (b'"', b'","a"', b'","b"', b'"},"a"', b'"},"b"', b'"}},"b"')),
    ]
    words += [b'"}', b'"}}', b',"a"', b',"b"']
    words += [
        prefix + bytes(chance.choices(ALPHABET, k=chance.randint(2, 4))) for prefix in prefixes for _ in range(70)
    ]
    return GrammarVocabulary.of_tokens([b"</s>", *words, b"", *random_tokens(chance, 60)], [0])


ROOT = {"$ref": "#"}
KEYED = {"type": ["object", "string"], "properties": {"a": ROOT, "b": ROOT}, "additionalProperties": False}
PAIRS = {"type": "array", "items": {"type": "array"}, "minItems": 1}
DEEP = {"type": ["array", "object"], "items": ROOT, "properties": {"a": PAIRS}, "required": ["a"]}


def test_rows_of_several_grammars(num_launches):
    chance = random.Random(0)
    schemas = [compile_schema(schema, budget()) for schema in (DEEP, KEYED)]
    vocabulary = vocabulary_of(chance, b"[[", b' "')
    machine = Machine(vocabulary, [nested(), *schemas, objects(), any_json(), any_json(1, 3)])
    assert (machine.tokens.prefixes > 255).sum() >= 2
    met = [(n, now) for n, fsm in enumerate(machine.fsms) for now in random_walk(fsm.automaton, chance, 6)]
    met += [(1, schemas[0].walk(START, b"[" * (MAX_DEPTH - room))) for room in range(4)]
    machine.check_masks(met)
    machine.check_masks(met[::5], torch.bfloat16)
    assert num_launches() == 4
    machine.check_advance(met, chance, in_place=True)
    machine.check_advance(met, chance, in_place=False)


@settings(max_examples=3, deadline=None)
@given(st.integers(0, 2**32))
def test_any_automaton(seed):
    chance = random.Random(seed)
    automaton = random_automaton(chance)
    try:
        machine = Machine(vocabulary_of(chance), [automaton])
    except GrammarError:
        return
    met = [(0, now) for now in random_walk(automaton, chance, 4)]
    deep = [now._replace(stack=now.stack[:1] * (MAX_DEPTH - 5) + now.stack) for _, now in met if now.stack]
    met += [(0, now) for now in deep[:3] if automaton.fits(now)]
    machine.check_masks(met)
    machine.check_advance(met, chance, in_place=chance.random() < 0.5)


def test_masks_stay_only_where_they_would_be_found_again():
    words = [b"aa", b"aaa", b'a"', b'"aa', b"aaaaa", b"[[", b"]]", b"]]]", b"b,", b"b}", b"  ", b'{"', b'":']
    letters = [bytes([byte]) for byte in (10, *range(32, 127))]
    vocabulary = GrammarVocabulary.of_tokens([b"</s>", *letters, *words], [0])
    machine = Machine(vocabulary, [nested(), objects(), any_json(1, 8), any_json()])
    options, slot = (machine.pool.tables, machine.tokens), torch.ones(1, dtype=torch.int32, device=DEVICE)
    for number, texts, num_kept in (
        (0, '" a a a', 0),  # the characters that may follow become fewer
        (0, "[ [ [ ] ]", 0),  # the same state, and other frames
        (1, "{ a , b, c", 0),  # the same state, and other keys after it
        (2, '{" a a ": " a a a a a a a', 3),  # of a key, and of a string that may have eight
        (3, '{" aaa ": " a aaa aa " , \n', 3),
    ):
        rows, found = machine.rows([(number, START)]), 0
        kept = torch.zeros(len(rows), machine.tokens.num_words, dtype=torch.int32, device=DEVICE)
        for text in texts.split(" "):
            grammar_mask(*options, rows, slot, kept, machine.grammars)
            again, fresh = rows.clone(), torch.zeros_like(kept)
            again[:, KEPT] = 0
            grammar_mask(*options, again, slot, fresh, machine.grammars)
            assert torch.equal(kept, fresh), (number, text)
            token_id = vocabulary.tokens.index(text.encode())
            grammar_advance(*options, rows, slot, slot, torch.tensor([token_id], device=DEVICE), machine.grammars)
            assert (rows[1, 0] >= 0).item(), (number, text)
            found += int(rows[1, KEPT])
        assert found == num_kept, (number, texts)
        machine.check_masks([(number, unpack_row(rows[1].cpu().numpy())[1])])


def test_without_a_gpu_numpy_does_the_same(monkeypatch):
    if not INTERPRETED:
        pytest.skip("tensors of a GPU")
    for module in (mask_module, advance_module):
        monkeypatch.setattr(module, "launches", lambda tensor: False)
    chance = random.Random(2)
    machine = Machine(vocabulary_of(chance), [objects(), any_json(1, 3)])
    met = [(n, now) for n, fsm in enumerate(machine.fsms) for now in random_walk(fsm.automaton, chance, 20)]
    machine.check_masks(met)
    machine.check_advance(met, chance, in_place=True)
    machine.check_advance(met, chance, in_place=False)


def test_a_row_that_lost_its_grammar_is_free():
    vocabulary = vocabulary_of(random.Random(3))
    machine = Machine(vocabulary, [any_json()])
    rows = machine.rows([(0, START)])
    slots = torch.ones(1, dtype=torch.int32, device=DEVICE)
    options = (machine.pool.tables, machine.tokens, rows)
    bracket = torch.tensor([vocabulary.tokens.index(b"]")], device=DEVICE)
    grammar_advance(*options, slots, slots, bracket, machine.grammars)
    words = torch.zeros(len(rows), machine.tokens.num_words, dtype=torch.int32, device=DEVICE)
    grammar_mask(*options, slots, words, machine.grammars)
    logits = torch.zeros(1, len(machine.tokens.ranks), device=DEVICE)
    remove_refused(words, slots, slots - 1, machine.tokens, logits)
    assert (logits == 0).all()


def test_a_row_that_goes_on_from_that_of_a_draft_has_a_mask_of_its_own():
    """The draft's row keeps its mask, since its token changes no state; its bits are not those of the request's row."""
    vocabulary = GrammarVocabulary.of_tokens([b"</s>", b'"', b"a"], [0])
    machine = Machine(vocabulary, [compile_schema({"type": "string"}, budget())])
    state = Constraint(Grammar.regex("a"), machine.fsms[0], START, base=machine.bases[0])
    rows = GrammarRows(2, machine.pool)
    row = partial(SamplingRow, SamplingParams(), 0, serial=1, constraint=state)
    for some, ids, allowed in (
        ([row(0, draft_id=1), row(1, output_ids=[1], num_drafts=1)], [1, 2], [[1], [1, 2]]),
        ([row(2, output_ids=[1, 2])], [1], [[1, 2]]),
    ):
        entered = rows.enter(some, range(len(some)))
        logits = rows.remove_refused(entered, torch.zeros(len(some), 3, device=DEVICE))
        assert [(each == 0).nonzero()[:, 0].tolist() for each in logits] == allowed
        rows.follow(entered, torch.tensor(ids, device=DEVICE))


def check_vocabulary(folder, num_rows):
    """Masks of rows along a document, of strings of up to 12 characters, so that the end is among them."""
    tokenizer = Tokenizer.load(folder)
    vocabulary = GrammarVocabulary.of(tokenizer, tokenizer.vocab_size + 64)
    document = tokenizer.encode('{"list": [1, {"é": "a – b"}], "ok": "\\n🙂"}', add_special_tokens=False)
    if INTERPRETED:  # which pays by the group of tokens: the document's, and every fiftieth
        kept = {*document, *range(0, len(vocabulary.tokens), 50)}
        tokens = [token if n in kept else b"" for n, token in enumerate(vocabulary.tokens)]
        vocabulary = GrammarVocabulary.of_tokens(tokens, vocabulary.end_ids)
    machine = Machine(vocabulary, [any_json(0, 12)])
    now, met = START, []
    for token_id in document:
        met.append((0, now))
        now = machine.fsms[0].next_state(now, token_id)
    assert machine.fsms[0].is_terminal(now)
    step = -(-len(met) // num_rows)
    machine.check_masks([*met[step // 2 :: step], (0, now)])
    machine.check_advance([*met[::step]], random.Random(4), in_place=True)


def test_the_demo_models_vocabulary(demo_folder):
    check_vocabulary(demo_folder, 3)


def test_real_vocabularies(tokenizer_folder):
    check_vocabulary(tokenizer_folder, 2 if INTERPRETED else 8)

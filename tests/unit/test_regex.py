"""Regular expressions as automata over bytes, compared with Python's."""

import json
import math
import random
import re
import struct
import unicodedata
from typing import Any

import pytest
import regex
from hypothesis import example, given
from hypothesis import strategies as st

from shared.grammar.limits import Budget, GrammarError, Limits, WorkError
from shared.grammar.patterns.characters import MAX_CHARACTER, Spelling
from shared.grammar.patterns.pattern import Parser
from shared.grammar.patterns.properties import property_members
from shared.grammar.patterns.regex import automaton_of, compile_choice, compile_regex
from shared.grammar.patterns.scripts import scripts
from tests.grammars import budget

ATOM = st.sampled_from(["a", "b", "é", ".", "[a-c]", "[^ab]", r"\d", r"\w", r"\s", r"\S", "-", "^", "$", "[é-ü1]"])
PATTERN = st.recursive(
    ATOM,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map("|".join).map("(?:{})".format),
        st.tuples(
            inner.map("({})".format), st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{2,}", "*?", "{0,2}?"])
        ).map("".join),
    ),
    max_leaves=6,
)
TEXT = st.text("abcéü1- \n", max_size=6)


def as_python(pattern: str) -> re.Pattern[str]:
    """``$`` is the end of the text alone, and a dot no line end."""
    return re.compile(pattern.replace("$", r"\Z"), re.ASCII)


@given(PATTERN, st.lists(TEXT, max_size=8), st.booleans())
def test_as_in_python(pattern: str, texts: list[str], is_search: bool) -> None:
    expected = as_python(pattern)
    match = expected.search if is_search else expected.fullmatch
    try:
        dfas = {
            spelling: compile_regex(pattern, budget(), search=is_search, spelling=spelling) for spelling in Spelling
        }
    except GrammarError:
        assert not any(map(match, texts)), "refused for the reason that it matches nothing"
        return
    for text in texts:
        assert bool(dfas[Spelling.UTF8].run(text.encode())) == bool(match(text)), text
        spelled = json.dumps(text, ensure_ascii=False)[1:-1].encode()
        assert bool(dfas[Spelling.JSON].run(spelled)) == bool(match(text)), text


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (r"\u00e9\x41\t\n\r\f\v\0", "éA\t\n\r\f\v\0", "éA\t\n\r\v\f\0"),
        (r"\cA\cb[\b]", "\x01\x02\x08", "A\x02\x08"),
        (r"\p{Lu}\p{N}\P{L}", "É²-", "é²-"),
        (r"\p{Uppercase_Letter}\p{gc=Number}\P{General_Category=Letter}", "É²-", "É²a"),
        (r"\p{Script=Greek}[\p{sc=Cyrl}]\P{sc=Latin}", "λЖ4", "λЖa"),
        (r"\p{Cased_Letter}\p{punct}\p{ASCII}\P{Any}?", "ǅ.a", "ǅ.é"),
        (r"[\]\-a^.]+", "]-a^.", "b"),
        (r"(?<year>\d{4})-(?P<month>\d\d)", "2026-11", "2026-1"),
        (r"\s", "\u2003", "x"),
        (r"a{,2}|x{", "a{,2}", "a"),
        (r"[a-\d]+[x-x]", "a-1x", "bx"),
        ("[+-]+", "-+", ","),
        (r"\.\$\/", ".$/", "x$/"),
    ],
)
def test_syntax(pattern: str, right: str, wrong: str) -> None:
    dfa = compile_regex(pattern, budget())
    assert dfa.run(right.encode())
    assert not dfa.run(wrong.encode())


@given(st.characters(), st.booleans())
@example("\U0010ffff", True)  # the last character
@example("\U00010000", False)  # the first one that UTF-16 writes as a pair
@example("\U0010ffff", False)
@example("\u0000", True)
def test_a_character_is_itself_however_it_is_written(character: str, is_in_class: bool) -> None:
    code, units = ord(character), character.encode("utf-16-be")
    forms = [f"\\u{{{code:x}}}", "".join(f"\\u{pair:04X}" for pair in struct.unpack(f">{len(units) // 2}H", units))]
    forms += [f"\\x{code:02x}"] * (code < 256) + [character if character.isalnum() else f"\\u{{00{code:X}}}"]
    others = [chr(other) for other in (code - 1, code + 1) if other in range(0xD800) or other in range(0xE000, 1 << 20)]
    for form in forms:
        dfa = compile_regex(f"[{form}]" if is_in_class else form, budget())
        assert dfa.run(character.encode()), form
        assert not any(dfa.run(other.encode()) for other in others), form


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(a", "an opening parenthesis without a closing one at position 0"),
        ("ab)", "a closing parenthesis without an opening one at position 2"),
        ("x[a", "an opening bracket without a closing one at position 1"),
        ("a**", "a quantifier after a quantifier at position 1"),
        ("a|*", "nothing to repeat at position 2"),
        ("^*", "repeats an anchor or a lookahead at position 1"),
        ("a(?<=b)", "a lookbehind, which is not supported, at position 1"),
        ("(?<!b)a", "a lookbehind"),
        ("(?=a)*", "repeats an anchor or a lookahead at position 5"),
        ("(?!a)a", "matches no text"),
        ("a(?=b)$", "matches no text"),
        (r"(a)\1", "a backreference, which no automaton can follow, at position 3"),
        (r"a\b", r"the word border \\b"),
        ("a{3,2}", "the bounds 3 and 2 in the wrong order"),
        ("a{20000}", "more than 10000 times"),
        ("a{" + "9" * 5000 + "}", "more than 10000 times"),
        ("[" + "ab" * 20_000 + "]", "a class of more than 20000 ranges at position 0"),
        ("[z-a]", "the range z-a in the wrong order"),
        ("a\\", "ends too early"),
        (r"\u12", "4 hexadecimal digits"),
        (r"\u{110000}", "an escape without a code point at position 0"),
        (r"\ud800", r"the surrogate U\+D800"),
        (r"\ud800\u0041", r"the surrogate U\+D800"),
        (r"\q", r"the unknown escape \\q"),
        (r"\p{Klingon}", "'Klingon', which is no category and no known script, at position 0"),
        (r"\p{Script=Lu}", "no known script"),
        (r"\p{sc=}", "no known script"),
        ("(?i)a", "a group of an unknown kind at position 0"),
        (r"a[^\s\S]", "matches no text"),
        ("a^b", "matches no text"),
        ("a(^)$", "matches no text"),
        ("(" * 200 + ")" * 200, "more than 100 groups"),
    ],
)
def test_what_is_refused(pattern: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        compile_regex(pattern, budget())


@pytest.mark.parametrize("pattern", ["(a|b)*a(a|b){17}", "((a{0,99}){0,99}){0,99}"])
def test_a_hostile_pattern_ends_within_its_budget(pattern: str) -> None:
    """Of states, and of work: the budget is asked again and again while the automaton grows."""
    with pytest.raises(GrammarError, match="more than 2000 states"):
        compile_regex(pattern, budget(states=2000), spelling=Spelling.JSON)
    with pytest.raises(WorkError, match="more than 50,000 units of work"):
        compile_regex(pattern, Budget(Limits(work=50_000)), spelling=Spelling.JSON)


class Counted(str):
    """A text that counts the characters that are copied out of it."""

    num_copied = 0

    def __getitem__(self, key: Any) -> str:
        found = super().__getitem__(key)
        self.num_copied += len(found)
        return found


@pytest.mark.parametrize("part", ["{", r"\p{Lu}"])
def test_a_long_pattern_is_parsed_within_the_budget(part: str) -> None:
    """A parser that copied the rest of the pattern at each character would take half a minute for a million."""
    pattern = Counted(part * 5000)
    Parser(pattern, budget()).parse()
    assert pattern.num_copied <= len(pattern)
    with pytest.raises(WorkError):
        Parser(pattern, Budget(Limits(work=len(pattern) // 2))).parse()


def test_bounds_are_of_each_repeat_and_each_nest_of_groups() -> None:
    Parser("a{10000}" + "(a)" * 200 + "(" * 100 + ")" * 100, budget()).parse()


@pytest.mark.parametrize("pattern", ["[^x]{0,200}", "[^x]{200,}", "y[^x]{200}", "(ab?){0,200}", "(a{200}b)*"])
def test_long_counted_repeats_compile(pattern: str) -> None:
    """In work that grows as the states do: minimization takes no round for each position of a chain."""
    counted = budget()
    dfa = compile_regex(pattern, counted, spelling=Spelling.JSON)
    assert counted.work < 100 * len(dfa)
    longest = {"y[^x]{200}": "yé" + "a" * 199, "(ab?){0,200}": "ab" * 200, "(a{200}b)*": "a" * 200 + "b"}
    text = longest.get(pattern, "é" * 200)
    assert dfa.run(text.encode())
    assert bool(dfa.run((text + "a").encode())) == (pattern == "[^x]{200,}")


@pytest.mark.parametrize("pattern", ["[L '-]{1,50}", "[L]{2,500}x", "x[L]{2,500}", "([L]){1,90}", "x[L]{0,400}"])
def test_a_search_needs_no_most_of_a_repeat(pattern: str) -> None:
    counted = budget()
    dfa = compile_regex(pattern.replace("L", r"\p{L}"), counted, search=True)
    judge = re.compile(pattern.replace("L", "a-zé"))
    assert counted.work < 300_000
    for text in ("", "1", "é", "éx", "ééx", "xéé", "xé1", "1éé1x", "éé xéé", "1xééx1"):
        assert bool(dfa.run(text.encode())) == bool(judge.search(text)), text


def test_a_choice() -> None:
    automaton = automaton_of(compile_choice(["yes", "no", "no way", "naïve"], budget()))
    for text in ("yes", "no", "no way", "naïve"):
        assert automaton.accepts(text.encode())
    for text in ("", "y", "no ", "naive", "yesno"):
        assert not automaton.accepts(text.encode())
    with pytest.raises(GrammarError, match="at least one text"):
        compile_choice([], budget())


REPEATED = [
    "[^x]{9,}",
    "(ab|a){3,}",
    "((ab){2,}|c){2,}d",
    "(a|b)*a(a|b){3,}",
    "(a{2,}b?){2,}",
    "^(ab?){2,}c|b{3,}$",
    "(a*b){2,}",
]


@pytest.mark.parametrize("pattern", REPEATED)
@pytest.mark.parametrize("search", [False, True])
def test_repeats_without_a_bound(pattern: str, search: bool) -> None:
    """Sets without the copies that later ones make needless accept the same texts."""
    dfa, chance = compile_regex(pattern, budget(), search=search), random.Random(0)
    judge = re.compile(pattern).search if search else re.compile(pattern).fullmatch
    num_matches = 0
    for _ in range(1500):
        text = "".join(
            chance.choices(["a", "b", "aab", "abab", "c", "d", "x"], (6, 6, 4, 4, 2, 2, 1), k=chance.randint(0, 7))
        )
        assert (dfa.run(text.encode()) != 0) == (judge(text) is not None), text
        num_matches += judge(text) is not None
    assert num_matches > 0


def test_a_search_for_a_long_run_compiles() -> None:
    """Its sets would have up to 500 numbers of characters read; of these only the largest matters."""
    dfa = compile_regex("[^x]{500,}", budget(), search=True)
    assert len(dfa) < 5000
    for text, is_found in (("é" * 499, False), ("é" * 500, True), ("a" * 300 + "x" + "b" * 499, False)):
        assert (dfa.run(text.encode()) != 0) == is_found
        assert dfa.run((text + "x" + "a" * 500).encode())


WITH_LOOKAHEAD = st.recursive(
    ATOM,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map("|".join).map("(?:{})".format),
        st.tuples(inner.map("({})".format), st.sampled_from(["*", "+", "?", "{2}"])).map("".join),
        st.tuples(st.sampled_from(["(?=", "(?!"]), inner, st.just(")")).map("".join),
        st.tuples(st.sampled_from(["(?=", "(?!"]), inner, st.just(")"), inner).map("".join),
    ),
    max_leaves=6,
)


@given(WITH_LOOKAHEAD, st.lists(TEXT, max_size=12), st.booleans())
def test_lookahead_as_in_python(pattern: str, texts: list[str], is_search: bool) -> None:
    test_as_in_python.hypothesis.inner_test(pattern, texts, is_search)


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        ("^(?!pattern$).*$", ["", "patter", "patterns", "é"], ["pattern"]),
        ("^((?!mode)(?!Mode).)*$", ["", "mod", "moMod", "é"], ["mode", "amodel", "Mode"]),
        (r"^(?=.*\d)(?=.*[a-z])(?!.*\s).{4,8}$", ["a1é-", "1234567z"], ["a1é", "abcd", "a 1b", "a12345678"]),
        ("^(?!^a)b|^(?!(?!c))", ["b", "c"], ["a", ""]),
        (r"(?!^)(?=a$)", ["ba"], ["a", "ab"]),
        ("^(?:(?!--)[a-z-])+$", ["a-b", "-"], ["a--b", ""]),
        ("(a(?=b)|b(?=a))*", ["", "x"], []),
        ("(?!a)$^|^(?=c)", ["", "c"], ["a", "b"]),
        ("^(?=$|..).*$", ["", "ab", "éab"], ["a"]),
        ("^(?=a|é).(?!é|b)", ["ac", "é"], ["ab", "éé", "c"]),
        (r"^(?=[\s\S]*a$)", ["a", "aba"], ["ab", ""]),
        ("^(?:(?!a)(?!b)|(?!c))[abc]$", ["a", "b", "c"], ["", "d", "ab"]),
        ("^(?:(?=a|b)(?=b|c)|(?=c))[abc]$", ["b", "c"], ["", "a"]),
    ],
)
def test_lookahead(pattern: str, right: list[str], wrong: list[str]) -> None:
    dfa = compile_regex(pattern, budget(), search=True, spelling=Spelling.JSON)
    for text in (*right, *wrong):
        assert bool(re.search(pattern, text)) == (text in right)
        assert bool(dfa.run(text.encode())) == (text in right), text


def test_a_hostile_lookahead_ends_within_its_budget() -> None:
    conditions = "".join(f"(?!.*{c}.{{9}}{c})" for c in "abcdefgh")
    for pattern in (f"^{conditions}.*$", f"^({conditions}.)*$"):
        with pytest.raises(WorkError):
            compile_regex(pattern, Budget(Limits(work=100_000, seconds=math.inf)), search=True)
    assert compile_regex("(?=" * 90 + "a" + ")" * 90, budget(), search=True).run(b"ba")


def test_scripts_are_those_of_unicode() -> None:
    """As another engine knows them, of the characters that Python knows."""
    for name in (*scripts(), "Sinh"):
        members = property_members(f"Script={name}")
        assert members is not None
        judge = regex.compile(rf"\p{{Script={name}}}")
        chosen = [
            code
            for first, last in scripts()[name]
            for code in (first - 1, first, last, last + 1)
            if code <= MAX_CHARACTER
        ]
        for code in chosen:
            is_known = unicodedata.category(chr(code)) not in ("Cn", "Cs")
            expected = is_known and bool(judge.match(chr(code)))
            assert expected == any(low <= code <= high for low, high in members), f"{name} {code:X}"

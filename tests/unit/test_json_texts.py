"""Grammars of schemas byte by byte: texts that are not JSON, digits, depth, limits of objects, and large schemas."""

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest

from shared.grammar.automata.automaton import MAX_DEPTH, MAX_DIGITS, START
from shared.grammar.documents.json_schema import compile_schema
from shared.grammar.limits import GrammarError
from tests.grammars import assert_language, budget

NO_JSON = b'1E400 -1e999 01 1. .5 +1 --1 "\xc0\xaf" "\xed\xa0\x80" "\\ud800" "a {"a":1,} [1,] [,1] nul'.split()
MANY = b"1" * (1 + MAX_DIGITS)
TEXTS: dict[str, tuple[Any, list[bytes], list[bytes]]] = {
    "texts that are no JSON": (
        {},
        [b"1E30", b"[1 , 2\n]"],
        [*NO_JSON, b'"\n"', b'{"a" 1}', b" 1", b"1 ", b"[1  ]", b"[\n\n]", b""],
    ),
    "a key with an escape would be another spelling of a": (
        {"properties": {"a": {"type": "integer"}}},
        [b'{"a": 1}'],
        [b'{"\\u0061": "x"}', b'{"a": 1, "a": 2}'],
    ),
    "an equal key does not count twice": (
        {"minProperties": 2, "type": "object"},
        [b'{"x":1,"y":2}', b'{"xa":1,"ya":2}', b'{"x":1,"x":2,"y":3}'],
        [b'{"x":1,"x":2}'],
    ),
    "an equal key does not come twice where the most is counted too": (
        {"minProperties": 2, "maxProperties": 3, "type": "object"},
        [b'{"x":1,"y":2,"z":3}'],
        [b'{"x":1,"x":2,"y":3}'],
    ),
    "minus zero is an integer from 0 on": ({"type": "integer", "minimum": 0}, [b"-0"], [b"-1"]),
    "digits end": (
        {},
        [MANY, b"-" + MANY, b"0." + MANY, MANY + b"." + MANY, MANY + b"e99", b"[" + MANY + b" ,\n " + MANY + b"\n]"],
        [b"1" * 400, b"-" + b"1" * 400, b"0." + b"1" * 400, b"1" * 400 + b".5", b"1" * 300 + b"e99"],
    ),
    "a fraction may end in zeros": (
        {"type": "number", "not": {"type": "integer"}},
        [b"1.50", b"-0.100", b"0.01"],
        [b"1.0", b"1.00", b"1"],
    ),
    "digits of an integer end": ({"type": "integer", "minimum": 1}, [MANY], [b"1" * 400]),
    "digits of a multiple end": ({"multipleOf": 6}, [b"12" * 10], [b"12" * 20]),
    "digits of a multiple of more than 10 end": ({"multipleOf": 60}, [b"60" * 10], [b"60" * 20]),
    "a multiple of a fraction is written as a decimal, with no more digits than a float keeps": (
        {"multipleOf": 0.01},
        [b"1", b"1.5", b"1.50", b"-0.0", b"1" * 13 + b".37", b"1" * 14 + b".3", b"1" * 15],
        [b"1.500", b"1e2", b"1" * 14 + b".37", b"1" * 16, b"0.001", b"1."],
    ),
    "numbers beside a large constant end": (
        {"anyOf": [{"type": "number"}, {"enum": [10**300]}]},
        [b"1" + b"0" * 300, b"1" * 308, b"0.5"],
        [b"1" * 309, b"1" + b"0" * 299 + b"e99"],
    ),
    "integers beside a large bound end": (
        {"anyOf": [{"type": "number", "minimum": 10**17}, {"type": "integer"}]},
        [b"1" * 308, b"7", b"1" * 20 + b".5"],
        [b"1" * 309, b"1.5"],
    ),
    "numbers beside a multiple end": (
        {"anyOf": [{"type": "string"}, {"multipleOf": 97}, {"type": "number", "maximum": 5}]},
        [b"970", b"-" + b"1" * 33],
        [b"98", b"1" * 400, b"-" + b"1" * 400],
    ),
    "unless its bound is beyond their end": (
        {"multipleOf": 5, "minimum": 10**21},
        [b"5" * 22],
        [b"5" * 20, b"5" * 24, b"5" * 309],
    ),
    "a large bound": ({"minimum": 10**300}, [b"9" * 301], [b"9" * 300, b"9" * 309]),
    "a fraction beside a large bound": ({"type": "number", "maximum": 10**17}, [b"-0.5", b"-" + b"1" * 308], []),
    "a bound that no float holds": ({"exclusiveMaximum": 10**400}, [b"1"], []),
    "a large constant below 0": ({"const": -1e20}, [b"-1e+20", b"-1" + b"0" * 20], [b"1e+20"]),
    "a constant that overflows a float": ({"enum": [1, 10**400]}, [b"1"], [b"1" + b"0" * 400]),
    "listed integers are written as integers": (
        {"enum": [1, 2.0, {"a": 3}]},
        [b"1", b"2", b'{"a": 3}'],
        [b"1.0", b"2.0", b'{"a": 3.0}'],
    ),
    "so are those of a small range": ({"type": "integer", "minimum": 1, "maximum": 9}, [b"9"], [b"9.0", b"1.0"]),
    "blanks in an empty array": ({"items": {"type": "integer"}, "maxItems": 1}, [b"[ ]", b"[\n]", b"[ 1]"], [b"[1,"]),
    "minus zero is below 1": ({"type": "integer", "minimum": 1}, [], [b"-0"]),
    "an anchor that is no text is none": (
        {"$anchor": ["n"], "$defs": {"n": {"$anchor": "n", "type": "integer"}}, "$ref": "#n"},
        [b"1"],
        [b'"n"'],
    ),
    "minus zero is the constant 0": ({"const": 0}, [b"-0"], []),
    "and is excluded with it": ({"type": "number", "not": {"const": 0}}, [b"-1", b"0.5"], [b"0", b"-0", b"-0.0"]),
    "a reader rounds 1e-400 to 0": ({"exclusiveMinimum": 0}, [b"1e-05"], [b"-0.0", b"0e-05", b"1e-400"]),
    "a reader rounds many nines to 1": (
        {"exclusiveMaximum": 1},
        [b"0.9999999999999999"],
        [b"0." + b"9" * number for number in (17, 18, 19, 20, 40)],
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts(name: str) -> None:
    schema, accepted, refused = TEXTS[name]
    assert_language(compile_schema(schema, budget()), accepted, refused)


@pytest.mark.parametrize(
    ("bounds", "mantissa", "is_written"),
    [
        ({}, "1", lambda text: "-" in text or int(text[2:]) <= 307),
        ({}, "12", lambda text: "-" in text or len(text.replace("+", "")) <= 5),
        ({"exclusiveMinimum": 0}, "1", lambda text: text == repr(float(text))),
        ({"exclusiveMinimum": 0, "maximum": 1e-4}, "1", lambda text: text == repr(float(text)) and "-" in text),
        ({"minimum": 10**16 - 1}, "1", lambda text: text == repr(float(text)) and "+" in text),
        ({"not": {"const": 10**16}}, "1", lambda text: text == repr(float(text)) and "-" in text),
        ({"not": {"const": 1e-4}}, "1", lambda text: text == repr(float(text))),
    ],
)
def test_exponents(bounds: dict[str, Any], mantissa: str, is_written: Callable[[str], bool]) -> None:
    """They overflow no float, and are written as in Python where the size of a number matters."""
    automaton = compile_schema({"type": "number"} | bounds, budget())
    digits = ["".join(each) for count in (1, 2, 3) for each in itertools.product("0123456789", repeat=count)]
    texts = [f"{mantissa}e{sign}{each}" for sign in ("", "+", "-") for each in digits]
    least = 1e-307 if bounds else 0
    expected = [text for text in texts if is_written(text) and least <= float(text) < 1e308]
    assert [text for text in texts if automaton.accepts(text.encode())] == expected


def test_a_full_string_begins_no_character() -> None:
    automaton = compile_schema({"type": "string", "maxLength": 1}, budget())
    assert automaton.accepts('"é"'.encode())
    assert automaton.walk(START, b'"a\xc3') is None


def test_nesting_ends_at_the_depth_of_the_stack() -> None:
    automaton = compile_schema({}, budget())
    assert automaton.accepts(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    assert automaton.walk(START, b"[" * (MAX_DEPTH + 1)) is None
    linked = {
        "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["next"],
        "type": "object",
    }
    automaton = compile_schema(linked, budget())
    assert automaton.accepts(b'{"next":' * MAX_DEPTH + b"null" + b"}" * MAX_DEPTH)
    assert automaton.walk(START, b'{"next":' * MAX_DEPTH + b"{") is None


@pytest.mark.parametrize("needs", [{}, {"dependentRequired": {"a": ["b"]}}, {"required": ["b"]}, {"minProperties": 2}])
def test_an_object_has_room_for_the_keys_that_it_needs(needs: dict[str, Any]) -> None:
    """A key is refused where the stack has no frames for another one that must follow."""
    arrays = {"type": "array", "items": {"type": "array", "maxItems": 0}, "minItems": 1}
    members = {"inner": {"$ref": "#"}, "a": {"type": "string"}, "b": arrays}
    automaton = compile_schema(
        {"type": "object", "properties": members, "additionalProperties": False} | needs, budget()
    )
    for depth in range(MAX_DEPTH - 4, MAX_DEPTH + 1):
        begun, has_room = b'{"inner":' * (depth - 1) + b"{", depth <= MAX_DEPTH - 2
        assert automaton.accepts(begun + b'"a":"x"' + b',"b":[[]]}' * depth) == has_room
        for more in (b'"a":"x', b'"a":"x"', b'"b":[') if needs else [b'"b":[']:
            assert (automaton.walk(START, begun + more) is not None) == has_room, (depth, more)


def test_many_keys() -> None:
    """The register has 64 bits: further optional keys may repeat, and more than 64 needed ones are refused."""
    keys = [f"key{number}" for number in range(300)]
    properties = {key: {"type": "integer"} for key in keys}
    automaton = compile_schema({"type": "object", "properties": properties, "additionalProperties": False}, budget())
    for ordered in (keys, keys[::-1]):
        assert automaton.accepts(json.dumps(dict.fromkeys(ordered, 1)).encode())
    assert not automaton.accepts(b'{"key1": 1, "key1": 1}')
    bounded = {"type": "object", "properties": properties, "additionalProperties": False, "maxProperties": 2}
    texts = [json.dumps(dict.fromkeys(keys[-count:], 1)).encode() for count in (1, 2, 3)]
    assert_language(compile_schema(bounded, budget()), texts[:2], texts[2:])
    with pytest.raises(GrammarError, match="more than 64"):
        compile_schema({"type": "object", "required": keys}, budget())


def test_large_schemas() -> None:
    words = [f"word {number * 7919 % 10_000}" for number in range(10_000)]
    automaton = compile_schema({"enum": words}, budget())
    assert automaton.accepts(b'"word 77"')
    assert not automaton.accepts(b'"word 10000"')
    assert compile_schema({"type": "string", "maxLength": 10**6}, budget()).num_states < 50


def test_lengths_beside_a_pattern_need_no_states() -> None:
    automaton = compile_schema({"type": "string", "pattern": "^[a-zé]+$", "minLength": 3, "maxLength": 5000}, budget())
    assert automaton.num_states < 20
    for length, is_valid in ((2, False), (3, True), (5000, True), (5001, False)):
        assert automaton.accepts(b'"' + "é".encode() * length + b'"') is is_valid
    fours = {"type": "string", "pattern": "^(aaaa|b)*$"}  # counted in blocks of four
    members = {key: fours | {"maxLength": 5000 + more} for key, more in (("x", 1), ("y", 3))}
    automaton = compile_schema({"type": "object", "properties": members}, budget())
    for number in range(5):
        text = b"aaaa" * 1250 + b"b" * number
        accepted = [automaton.accepts(b'{"%b": "%b"}' % (key, text)) for key in (b"x", b"y")]
        assert accepted == [number <= 1, number <= 3], number
    one_a = compile_schema({"type": "string", "pattern": "^(a|[b-z]+)$", "minLength": 2, "maxLength": 9}, budget())
    assert one_a.accepts(b'"bb"')
    assert one_a.walk(START, b'"a') is None, "it could not go on to two characters"
    ends_with_b = {"type": "string", "pattern": "b$", "maxLength": 3}  # a counter could stop it before the b
    automaton = compile_schema(ends_with_b, budget())
    assert automaton.accepts(b'"aab"')
    assert automaton.walk(START, b'"aaa') is None

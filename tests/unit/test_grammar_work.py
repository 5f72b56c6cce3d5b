"""Hostile schemas, one of a kind: what each is refused for, after how much work, and that work is the same everywhere.

No clock decides: the numbers are of work.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shared.grammar.documents.json_schema import compile_schema
from shared.grammar.documents.texts import _patterns
from shared.grammar.limits import MOST_KEPT, Budget, GrammarError, Limits, Remembered, WorkError
from shared.grammar.patterns.regex import _fragments
from tests.grammars import UNTIMED

ROOT = Path(__file__).parents[2]


def keyed(n: int, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {f"k{n}": {"type": "integer"}}, "required": [f"k{n}"], **more}


def nested(depth: int, wrap: Callable[[Any], Any]) -> Any:
    inner: Any = {"type": "integer"}
    for _ in range(depth):
        inner = wrap(inner)
    return inner


def defined(n: int) -> dict[str, Any]:
    inner = {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{n * 7 % 300}"}}}
    return {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}, inner]}


def condition(n: int) -> dict[str, Any]:
    return {"if": {"properties": {"t": {"const": f"t{n}"}}, "required": ["t"]}, "then": {"required": [f"k{n}"]}}


SMALL = replace(UNTIMED, work=200_000)
"""A fifth of what a grammar may need, so that the tests take a fifth of the time."""
WORK, STATES, KEYS, BRANCHES = "units of work", "more than 60000 states", "64 named keys", "2048 combined alternatives"
HOSTILE: dict[str, tuple[Any, str | None]] = {
    "a required key each": ({"anyOf": [keyed(n) for n in range(1000)]}, KEYS),
    "closed objects": ({"anyOf": [keyed(n, additionalProperties=False) for n in range(1000)]}, KEYS),
    "a property each": ({"anyOf": [{"type": "object", "properties": {f"k{n}": {}}} for n in range(1200)]}, WORK),
    "exactly one": ({"oneOf": [keyed(n) for n in range(400)]}, WORK),
    "all of many": ({"allOf": [{"properties": {f"k{n}": {"minimum": n}}} for n in range(5000)]}, WORK),
    "all of many choices": ({"allOf": [{"anyOf": [{"minimum": n}, {"type": "string"}]} for n in range(400)]}, WORK),
    "numbers of items": ({"anyOf": [{"items": {"enum": [f"e{n}"]}, "minItems": n} for n in range(400)]}, WORK),
    "constants": ({"anyOf": [{"const": n * 7919} for n in range(5000)]}, BRANCHES),
    "listed objects": ({"enum": [{f"k{n}": n} for n in range(3000)]}, BRANCHES),
    "a listed text": ({"enum": ["a" * 90_000]}, WORK),
    "listed numbers": ({"enum": [n * 1.5 for n in range(50_000)]}, WORK),
    "excluded numbers": ({"type": "number", "not": {"enum": [n + 0.5 for n in range(5000)]}}, WORK),
    "excluded texts": ({"type": "string", "not": {"enum": [f"t{n}" for n in range(4000)]}}, None),
    "nested arrays": (nested(60, lambda inner: {"items": inner}), None),
    "nested alternatives": (nested(11, lambda inner: {"anyOf": [inner, {"properties": {"a": inner}}]}), WORK),
    "references": (
        {"$defs": {f"d{n}": defined(n) for n in range(300)} | {"d300": {}}, "$ref": "#/$defs/d0"},
        WORK,
    ),
    "conditions": ({"allOf": [condition(n) for n in range(200)]}, WORK),
    "a counter": ({"pattern": "^[a-zé]{0,5000}x{0,5000}$"}, WORK),
    "counters in counters": ({"pattern": "((a{0,99}){0,99}){0,99}"}, WORK),
    "sets of states": ({"pattern": "(a|b)*a(a|b){17}"}, WORK),
    "classes": ({"pattern": r"^[\p{L}]{0,500}x?$"}, WORK),
    "conditions of a pattern": ({"pattern": "^(" + "".join(f"(?!.*{c}.{{9}}{c})" for c in "abcdefgh") + ".)*$"}, WORK),
    "conditions that are nested": ({"pattern": "(?!" * 30 + "a" + ")" * 30}, None),
    "a wide class": ({"pattern": "[" + "".join(chr(0x100 + 2 * n) for n in range(3000)) + "]{0,50}"}, None),
    "a product of patterns": (
        {"type": "string", "allOf": [{"pattern": f"{c}{{{n}}}"} for n, c in enumerate("abcdefgh", 9)]},
        WORK,
    ),
    "patterns of keys": (
        {
            "type": "object",
            "patternProperties": {f"{c}.{{3}}{c}": {"maximum": ord(c)} for c in "abcdefghijkl"},
        },
        WORK,
    ),
    "a format and a length": ({"type": "string", "format": "uri", "maxLength": 2000}, None),
    "a format and two lengths": ({"type": "string", "format": "uri", "minLength": 1000, "maxLength": 2000}, STATES),
    "a choice of a format and a length": (
        {"anyOf": [{"type": "string", "format": "uri", "maxLength": 2000}, {"const": "x"}]},
        STATES,
    ),
    "names by patterns": (
        {"type": "object", "propertyNames": {"anyOf": [{"pattern": f"^k{n}[a-z]*$"} for n in range(300)]}},
        WORK,
    ),
    "a chain of dependents": (
        {"type": "object", "dependentRequired": {f"k{n}": [f"k{n + 1}"] for n in range(3000)}},
        WORK,
    ),
    "a long name": ({"properties": {"x" * 300_000: {"properties": {f"k{n}": {} for n in range(5000)}}}}, WORK),
    "properties": ({"properties": {f"key{n}": {"type": "integer"} for n in range(9000)}}, WORK),
    "closed properties": (
        {"properties": {f"key{n}": {"type": "string"} for n in range(600)}, "additionalProperties": False},
        None,
    ),
    "counted keys": ({"minProperties": 30, "propertyNames": {"pattern": "^[a-z]{3,60}$"}}, WORK),
    "divisors": ({"type": "integer", "allOf": [{"multipleOf": 10**400 + n} for n in range(60)]}, WORK),
    "a divisor": ({"type": "integer", "multipleOf": 50_001}, None),
    "a divisor of many digits": ({"multipleOf": 10**200}, WORK),
    "divisors of a part": ({"allOf": [{"multipleOf": (n * 7919 + 1) / 10**9} for n in range(200)]}, None),
    "items": ({"items": {"type": "integer"}, "minItems": 100_000}, WORK),
    "two keys of each": ({"type": "object", "anyOf": [{"required": [f"a{n}", f"b{n}"]} for n in range(24)]}, "keys"),
}


def verdict(schema: Any, limits: Limits = SMALL) -> tuple[str | None, int]:
    """The message of the refusal, and the work until then."""
    budget = Budget(limits)
    try:
        compile_schema(schema, budget)
    except GrammarError as error:
        return str(error), budget.work
    return None, budget.work


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_ends_within_the_work(name: str) -> None:
    schema, expected = HOSTILE[name]
    said, work = verdict(schema)
    assert (said is None) == (expected is None), said
    assert (expected or "") in (said or "")
    assert (work > SMALL.work) == (expected == WORK)


def test_what_was_compiled_before_changes_no_count() -> None:
    """Two patterns that need the same class of characters, in any order, and one that was dropped in between."""
    one, other = {"pattern": r"^\p{L}x$"}, {"pattern": r"^\p{L}\w{3}$"}
    both = {"properties": {"a": one, "b": other}}
    found = set()
    for order in ([one, other, both], [both, other, one], [other, both, one]):
        for table in (_fragments, _patterns):
            table._kept.clear()
            table._work = 0
        counts = {json.dumps(schema): verdict(schema)[1] for schema in order}
        found.add(tuple(counts[json.dumps(schema)] for schema in (one, other, both)))
        _fragments._kept.clear()
        assert verdict(both)[1] == counts[json.dumps(both)]
    assert len(found) == 1


def test_an_attempt_that_fails_counts_its_work_and_no_states() -> None:
    whole = Budget(replace(UNTIMED, states=100))
    for message, num_states in (("more than 50 states", 0), ("", 40)):
        with nullcontext() if not message else pytest.raises(GrammarError, match=message), whole.attempt() as part:
            part.keep(40)
            part.keep(11 if message else 0)
        assert whole.num_states == num_states
    assert whole.work == 3, "of both attempts, but for what was refused"
    spent = Budget(replace(UNTIMED, work=100))
    with pytest.raises(WorkError), spent.attempt(reserve=20) as part:
        part.spend(41)  # half of what is not reserved is 40
    assert spent.work == 41, "an attempt that needs too much work is not free"


def test_a_table_remembers_no_more_than_its_units() -> None:
    table: Remembered[str] = Remembered(100)
    for number in range(20):
        budget = Budget(UNTIMED)

        def make(budget: Budget = budget) -> str:
            budget.spend(MOST_KEPT // 10)
            return "made"

        assert table.get(number, make, budget) == "made"
    assert list(table._kept) == list(range(10, 20))


def test_many_objects_that_need_a_key_each_are_refused_before_they_are_compared() -> None:
    said, work = verdict({"anyOf": [keyed(n) for n in range(2000)]}, UNTIMED)
    assert KEYS in (said or "")
    assert work < 150 * 2000


SAMPLES = ("exactly one", "excluded texts", "nested alternatives", "two keys of each", "a counter")
MEASURE = """
import json
from shared.grammar.documents.json_schema import compile_schema
from tests.unit.test_grammar_work import HOSTILE, SAMPLES, UNTIMED, Budget, verdict
number = compile_schema({"type": "integer"}, Budget(UNTIMED))
accepted = [number.accepts(b"1" * length) for length in (7, 8)]
print(json.dumps([accepted, [verdict(HOSTILE[name][0]) for name in SAMPLES]]))
"""


def test_the_order_of_sets_changes_no_verdict() -> None:
    """In processes whose texts hash differently, with nothing compiled before, and with a setting of their own."""
    found = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "INFER_MAX_DIGITS": "6"}
        done = subprocess.run(
            [sys.executable, "-c", MEASURE], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    assert found[0] == found[1]
    assert found[0][0] == [True, False]

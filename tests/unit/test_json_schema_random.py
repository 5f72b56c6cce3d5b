"""Random schemas, random documents and random walks: the compiler against a validator. Marked slow: `json_schema/`
has an example of every keyword."""

import json
import os
import random
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.grammar.documents import masked_objects
from shared.grammar.documents.json_schema import compile_schema
from shared.grammar.limits import GrammarError
from tests.grammar_walks import byte_classes, random_text
from tests.grammars import budget

pytestmark = pytest.mark.slow
KEYS = ["a", "b", "ab", "c\n"]
SCALARS: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    2,
    -1,
    3,
    10,
    1.5,
    -2.5,
    0.1,
    0.02,
    1e-06,
    "",
    "a",
    "ab",
    "abc",
    "é",
    "b\n",
]

documents = st.recursive(
    st.sampled_from(SCALARS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=6,
)
TYPES = ["object", "array", "string", "number", "integer", "boolean", "null", ["string", "null"], ["object", "array"]]


def keywords(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """One or two keywords with their values; two dictionaries are joined to a schema."""

    def one(names: str, values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
        return st.builds(lambda name, value: {name: value}, st.sampled_from(names.split()), values)

    some_keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=2, unique=True)
    schemas = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        one("type", st.sampled_from(TYPES)),
        one("properties", st.dictionaries(st.sampled_from(KEYS), inner, min_size=1, max_size=3)),
        one("required", some_keys),
        one("additionalProperties", st.just(False) | inner),
        one("patternProperties", st.dictionaries(st.sampled_from(["^a", "b$", "^.$"]), inner, min_size=1, max_size=1)),
        one("propertyNames", st.sampled_from([{"maxLength": 1}, {"pattern": "^a"}, {"enum": ["a", "b"]}])),
        one("minProperties maxProperties minItems maxItems minLength maxLength", st.integers(0, 3)),
        one("dependentRequired", st.dictionaries(st.sampled_from(KEYS), some_keys, min_size=1, max_size=1)),
        one("items", st.just(False) | inner),
        one("uniqueItems", st.booleans()),
        one("prefixItems", st.lists(inner, min_size=1, max_size=2)),
        one("enum", st.lists(documents, min_size=1, max_size=3)),
        one("const", documents),
        one("anyOf oneOf allOf", schemas),
        one("not", inner),
        st.builds(lambda a, b, c: {"if": a, "then": b, "else": c}, inner, inner, inner),
        one("pattern", st.sampled_from(["a", "^a", "b$", "^[ab]*$", "é", "^.b"])),
        one("minimum maximum exclusiveMinimum exclusiveMaximum", st.sampled_from([0, 1, -1, 1.5, 10, 0.1, -2.5])),
        one("multipleOf", st.sampled_from([1, 2, 3, 0.5, 0.02, 2.5])),
        st.just({"$ref": "#/$defs/x"}),
    )


def joined(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    parts = st.lists(keywords(inner), min_size=1, max_size=3)
    return parts.map(lambda found: {key: value for part in found for key, value in part.items()})


schemas = st.recursive(st.sampled_from([{}, True, {"type": "integer"}, {"type": "string"}]), joined, max_leaves=8)


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(
    joined(schemas), joined(schemas), st.lists(documents, min_size=12, max_size=12), st.randoms(use_true_random=False)
)
def test_random_schemas(
    schema: dict[str, Any], other: dict[str, Any], instances: list[Any], chance: random.Random
) -> None:
    schema = schema | {"$defs": {"x": other}}
    judge = jsonschema_rs.Draft202012Validator(schema)
    try:
        automaton = compile_schema(schema, budget(states=5000))
    except GrammarError as error:
        is_empty = "accepts nothing" in str(error)
        assert not (is_empty and any(map(judge.is_valid, instances)))
        return
    text = json.dumps(schema)  # where keys that may be equal are not all counted, and items that may be equal refused
    is_counted = "minProperties" in text or '"uniqueItems": true' in text
    if "additionalProperties" in text or "patternProperties" in text:  # after a wrong key a right one may be the same
        is_counted |= any(keyword in text for keyword in ('"not"', '"oneOf"', '"if"'))
    for instance in instances:
        is_accepted = automaton.accepts(json.dumps(instance, ensure_ascii=False).encode())
        is_valid = judge.is_valid(instance)
        assert is_accepted <= is_valid, f"false accept of {instance}"
        assert is_counted or is_accepted == is_valid, f"false reject of {instance}"
    text = random_text(automaton, chance, byte_classes(automaton))
    assert judge.is_valid(json.loads(text)), text


ITEMS: list[Any] = [
    *({"enum": values} for values in (["a", "ab", 1], [1, 12, 2, 1.5, -1], [True, None, 0, "b"])),
    *({"type": name} for name in ("string", "boolean", ["string", "null"])),
    *({"type": "integer", "minimum": 0, "maximum": most} for most in (2, 13)),
    *({"type": "string", **more} for more in ({"maxLength": 2}, {"pattern": "^a*b?$"}, {"minLength": 1})),
    *({"enum": [f"t{n}" for n in range(40)]}, {"anyOf": [{"const": 1}, {"pattern": "^a", "type": "string"}]}),
]


@pytest.mark.parametrize("counts", [{}, {"minItems": 2}, {"minItems": 1, "maxItems": 3}], ids=str)
@pytest.mark.parametrize("items", ITEMS, ids=lambda items: json.dumps(items)[:40])
def test_unique_items(items: Any, counts: dict[str, int]) -> None:
    schema = {"type": "array", "items": items, "uniqueItems": True} | counts
    judge = jsonschema_rs.Draft202012Validator(schema)
    automaton = compile_schema(schema, budget())
    chance = random.Random(str(schema))
    possible = [one for one in (*SCALARS, 12, 13, "t3", "t30") if jsonschema_rs.is_valid(items, one)]
    for _ in range(60):
        instance = chance.choices(possible, k=chance.randrange(5)) + chance.sample(SCALARS, chance.random() < 0.1)
        is_accepted = automaton.accepts(json.dumps(instance, ensure_ascii=False).encode())
        is_summed = sum(isinstance(item, str) for item in instance) > 1  # sums may be equal
        assert is_accepted <= judge.is_valid(instance), f"false accept of {instance}"
        assert is_summed or is_accepted == judge.is_valid(instance), f"false reject of {instance}"
    if automaton.num_states < 100:  # many states of a string have many bytes that tell sums apart
        text = random_text(automaton, chance, byte_classes(automaton))
        assert judge.is_valid(json.loads(text)), text


VALUES: list[Any] = [
    *({"const": value} for value in ("a", "ab", "b", 1, 2, None)),
    *({"enum": values} for values in (["a", "b"], ["ab", 1], [1, 2, 1.5], [True, "a"])),
    *({"type": name} for name in ("string", "integer", "number", "boolean", "object", "array")),
    *({"minimum": 1}, {"type": "integer", "maximum": 12}, {"maxLength": 1}, {"description": "anything"}, True),
    *({"properties": {"a": {"const": value}}, "type": "object"} for value in (1, "a")),
    *({"required": ["a"]}, {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
    {"type": "array", "items": {"type": "integer"}},
]
open_objects = st.fixed_dictionaries(
    {"type": st.just("object"), "properties": st.dictionaries(st.sampled_from(KEYS), st.sampled_from(VALUES))},
    optional={
        "required": st.lists(st.sampled_from(KEYS), max_size=2, unique=True),
        "additionalProperties": st.sampled_from([{"type": "integer"}, {"type": ["string", "integer"]}]),
        "dependentRequired": st.just({"a": ["b"]}),
        "not": st.sampled_from([{"required": ["a"]}, {"required": ["c\n"]}, {"properties": {"b": {"const": "a"}}}]),
    },
)
members = st.dictionaries(
    st.sampled_from([*KEYS, "d"]), st.sampled_from([*SCALARS[:16], {}, {"a": 1}, {"a": "a"}, [1]]), max_size=4
)


@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(["anyOf", "oneOf"]),
    st.lists(open_objects, min_size=2, max_size=5),
    st.lists(members, min_size=20, max_size=20),
    st.randoms(use_true_random=False),
)
def test_alternatives_of_open_objects(
    keyword: str, alternatives: list[Any], instances: list[Any], chance: random.Random
) -> None:
    """As bits of the frame, also where few alternatives would be states."""
    schema = {keyword: alternatives}
    judge = jsonschema_rs.Draft202012Validator(schema)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(masked_objects, "FEWEST_MASKED", 2)
            automaton = compile_schema(schema, budget())
    except GrammarError as error:
        is_empty = "accepts nothing" in str(error)
        assert not (is_empty and any(map(judge.is_valid, instances))), "a schema that accepts something is refused"
        return
    for instance in instances:
        is_accepted = automaton.accepts(json.dumps(instance, ensure_ascii=False).encode())
        assert is_accepted == judge.is_valid(instance), f"a wrong verdict on {instance}"
    text = random_text(automaton, chance, byte_classes(automaton))
    assert judge.is_valid(json.loads(text)), text


REAL = Path(os.environ.get("INFER_REAL_SCHEMAS", "../shared/schemas/real_schemas.jsonl"))


@pytest.mark.skipif(not REAL.is_file(), reason="set INFER_REAL_SCHEMAS to a file of schemas with tests")
def test_real_schemas() -> None:
    """Every seventh of a sample of MaskBench: 97 % compile, 96 % have all tests right, none accepts falsely."""
    lines = REAL.read_text(encoding="utf-8").splitlines()[::7]
    num_compiled = num_right = 0
    for line in lines:
        sample = json.loads(line)
        try:
            automaton = compile_schema(sample["schema"], budget())
        except GrammarError:
            continue
        num_compiled += 1
        found = [
            (automaton.accepts(json.dumps(test["data"], ensure_ascii=False).encode()), test["valid"])
            for test in sample["tests"]
        ]
        assert all(is_accepted <= is_valid for is_accepted, is_valid in found), f"false accept: {sample['name']}"
        num_right += all(is_accepted == is_valid for is_accepted, is_valid in found)
    assert num_compiled >= 0.97 * len(lines)
    assert num_right >= 0.96 * len(lines)

"""Formats of strings: what each accepts, and what it refuses."""

import json

import jsonschema_rs
import pytest

from shared.grammar.documents.json_schema import compile_schema
from shared.grammar.patterns.formats import FORMATS
from tests.grammars import budget

EXAMPLES: dict[str, tuple[list[str], list[str]]] = {
    "date": (
        ["2024-02-29", "2000-02-29", "1999-12-31"],
        ["2023-02-29", "1900-02-29", "1999-04-31", "99-1-1"],
    ),
    "time": (["23:59:59Z", "01:02:03.5+23:59"], ["24:00:00Z", "12:00:00", "1:02:03Z"]),
    "date-time": (["2024-02-29T00:00:00z"], ["2023-02-29T00:00:00Z", "2024-02-28 00:00:00Z"]),
    "duration": (["P1Y2M3D", "PT1H", "P2W", "P1DT1S"], ["P", "PT", "P1", "P1DT", "1D", "P1S", "PT1S1M"]),
    "uuid": (["00000000-0000-0000-0000-00000000000F"], ["00000000-0000-0000-0000-00000000000g", "0"]),
    "ipv4": (["0.0.0.0", "255.199.99.9"], ["256.0.0.1", "1.2.3", "01.2.3.4"]),
    "ipv6": (
        ["::", "::1", "1::", "1:2:3:4:5:6:7:8", "1:2::7:8", "::ffff:1.2.3.4", "1:2:3:4:5:6:1.2.3.4", "1::d6:1.2.3.4"],
        [
            "1",
            ":",
            "1:2:3:4:5:6:7",
            "1::2::3",
            "1:2:3:4:5:6:7:8:9",
            "1:2:3:4:5:6:7:8::",
            "::ffff:1.2.3",
            "12345::",
            "1:2:3:4:5:6:7:1.2.3.4",
        ],
    ),
    "hostname": (["a", "a-b.example", "a" * 63], ["a" * 64, "-a", "a-", "a..b", "", "a_b"]),
    "email": (["a.b+c@example.com"], ["a", "@b.c", "a@", ".a@b.c"]),
    "uri": (["http://a/b?c#d", "mailto:a@b", "http://[::1]:80/"], ["//a/b", "a b:c", "http://a/\\", "/a"]),
    "uri-reference": (["http://a", "//a/b", "/a", "a", "", "#a", "?a"], ["\\\\a", "#a\\b", "a b"]),
    "iri": (["http://ƒøø.ßår/?∂éœ=πîx"], ["/abc", "âππ", "http://a b"]),
    "iri-reference": (["/âππ", "#ƒrägmênt", ""], ["\\\\é", "#é\\b"]),
    "json-pointer": (["", "/", "/a~0~1b"], ["a", "/~", "/~2"]),
    "relative-json-pointer": (["0", "1#", "120/foo/~0"], ["", "/a", "-1/a", "01/a", "0##"]),
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str) -> None:
    schema = {"type": "string", "format": name}
    automaton = compile_schema(schema, budget())
    validator = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
    for texts, expected in zip(EXAMPLES[name], (True, False), strict=True):
        for text in texts:
            assert automaton.accepts(json.dumps(text, ensure_ascii=False).encode()) is expected, text
            assert validator.is_valid(text) is expected, f"another library judges {text!r} otherwise"


def test_an_unknown_format_is_an_annotation() -> None:
    assert compile_schema({"type": "string", "format": "unheard-of"}, budget()).accepts(b'"any"')

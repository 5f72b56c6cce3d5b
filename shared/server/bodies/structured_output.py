"""The fields of a body that give the answer a grammar, as sent by OpenAI's, vLLM's and other clients.

Introduced in phase 12. Invariants: there is at most one grammar, whichever field gives it; an error names that field.
"""

from collections.abc import Iterator
from typing import Any, cast

from shared.grammar.grammar import Grammar
from shared.grammar.limits import GrammarError
from shared.server.bodies.fields import closed, nullable, short
from shared.server.errors import ApiError, invalid

_TEXT = {"type": "string", "minLength": 1}
_SCHEMA = {"type": ["object", "boolean"]}
_CHOICE = {"type": "array", "items": _TEXT, "minItems": 1}
_NAMED = closed(
    ["schema"],
    name=nullable({"type": "string"}),
    description=nullable({"type": "string"}),
    schema=_SCHEMA,
    strict=nullable({"type": "boolean"}),
)


def _format(kind: str, **properties: Any) -> dict[str, Any]:
    return closed(type={"const": kind}, **properties)


RESPONSE_FORMAT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "null"},
        _format("text"),
        _format("json_object"),
        _format("json_schema", json_schema=_NAMED),
        _format("json_schema", schema=_SCHEMA),
        _format("regex", pattern=_TEXT),
    ]
}
_FORMATS: dict[str, set[str]] = {"text": set(), "json_object": set(), "json_schema": {"schema"}, "regex": {"pattern"}}
_LABELS: dict[str, tuple[type, str]] = {
    "name": (str, "a text"),
    "description": (str, "a text"),
    "strict": (bool, "a boolean"),
}
"""Fields of ``json_schema`` that change nothing."""
_KINDS = {"json": "json_schema", "regex": "regex", "choice": "choice"}
_JSON = {"anyOf": [_SCHEMA, _TEXT]}
_CLOSED = "disable_additional_properties"
_OPTIONS = {_CLOSED: nullable({"type": "boolean"})}
_GIVEN: dict[str, dict[str, Any]] = {
    "json": _JSON,
    "regex": _TEXT,
    "choice": _CHOICE,
    "json_object": {"const": True},
}
"""One of these is given; the others may be null."""
STRUCTURED_OUTPUTS_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "null"},
        *(
            closed([name], **{each: {"type": "null"} for each in _GIVEN} | {name: kind} | _OPTIONS)
            for name, kind in _GIVEN.items()
        ),
    ]
}
GUIDED_SCHEMAS: dict[str, dict[str, Any]] = {
    f"guided_{name}": nullable(kind) for name, kind in {"json": _JSON, "regex": _TEXT, "choice": _CHOICE}.items()
}


def described_grammar(body: Any, *, is_closed: bool = False) -> tuple[Grammar, str] | None:
    """The grammar of a body, and the field that gives it. Raises ApiError.

    Args:
        is_closed: as in ``Grammar.json_schema``, unless the body says otherwise.
    """
    found = list(_described(body, is_closed))
    if len(found) > 1:
        names = " and ".join(param for _, param in found)
        raise invalid(f"An answer has one grammar, and {names} are given; leave out all but one.", param=found[1][1])
    return found[0] if found else None


def _described(body: Any, is_closed: bool) -> Iterator[tuple[Grammar, str]]:
    if body.response_format is not None:
        yield from _of_response_format(body.response_format, is_closed)
    if body.structured_outputs is not None:
        yield _of_structured_outputs(body.structured_outputs, is_closed)
    for name, kind in _KINDS.items():
        value = getattr(body, f"guided_{name}")
        if value is not None:
            yield _made(kind, value, f"guided_{name}", is_closed), f"guided_{name}"


def _of_response_format(value: Any, is_closed: bool) -> Iterator[tuple[Grammar, str]]:
    param = "response_format"
    kind = value.get("type") if isinstance(value, dict) else None
    if not (isinstance(kind, str) and kind in _FORMATS):
        said = "it must be an object whose type is text, json_object, json_schema or regex."
        raise invalid(f"response_format is {short(value)}; {said}", param=param)
    rest = {name: field for name, field in value.items() if name != "type"}
    if kind == "json_schema" and "json_schema" in rest:
        _fields(param, rest, set(), {"json_schema"})
        param, rest = f"{param}.json_schema", rest["json_schema"]
        rest = _fields(param, rest, {"schema"}, {"schema", *_LABELS})
        for name, (kind_of_label, said) in _LABELS.items():
            label = rest.get(name)
            if label is not None and not isinstance(label, kind_of_label):
                raise invalid(f"{param}.{name} is {short(label)}; it must be {said}.", param=f"{param}.{name}")
    else:
        rest = _fields(param, rest, _FORMATS[kind], _FORMATS[kind])
    if kind == "json_object":
        yield Grammar.json_object(), param
    elif kind == "json_schema":
        if not isinstance(rest["schema"], dict | bool):
            raise invalid(
                f"{param}.schema is {short(rest['schema'])}; it must be an object or a boolean.",
                param=f"{param}.schema",
            )
        yield _made("json_schema", rest["schema"], f"{param}.schema", is_closed), f"{param}.schema"
    elif kind == "regex":
        yield _made("regex", rest["pattern"], f"{param}.pattern"), f"{param}.pattern"


def _of_structured_outputs(value: Any, is_closed: bool) -> tuple[Grammar, str]:
    param = "structured_outputs"
    if isinstance(value, dict) and value.get(_CLOSED) is not None:
        if not isinstance(value[_CLOSED], bool):
            field = f"{param}.{_CLOSED}"
            raise invalid(f"{field} is {short(value[_CLOSED])}; it must be a boolean.", param=field)
        is_closed = value[_CLOSED]
    fields = value if isinstance(value, dict) else {}
    given = {name for name, field in fields.items() if field is not None and name != _CLOSED}
    if len(given) != 1 or not given <= {*_KINDS, "json_object"}:
        said = "it must be an object with one of json, regex, choice and json_object."
        raise invalid(f"structured_outputs is {short(value)}; {said}", param=param)
    name = given.pop()
    if name == "json_object":
        if value[name] is not True:
            raise invalid(f"{param}.json_object is {short(value[name])}; it must be true.", param=f"{param}.{name}")
        return Grammar.json_object(), param
    return _made(_KINDS[name], value[name], f"{param}.{name}", is_closed), f"{param}.{name}"


def _fields(param: str, value: Any, needed: set[str], known: set[str]) -> dict[str, Any]:
    """The fields of an object. Raises ApiError for a missing or unknown field."""
    if not isinstance(value, dict):
        raise invalid(f"{param} is {short(value)}; it must be an object.", param=param)
    for name in needed - value.keys():
        raise invalid(f"{param}.{name} is missing.", param=f"{param}.{name}")
    for name in (name for name in value if name not in known):
        raise invalid(f"The field {param}.{name} is unknown.", param=f"{param}.{name}")
    return value


def _made(kind: str, value: Any, param: str, is_closed: bool = False) -> Grammar:
    try:
        if kind == "json_schema":
            return Grammar.json_schema(value, is_closed=is_closed)
        return cast(Grammar, getattr(Grammar, kind)(value))
    except GrammarError as error:
        raise refusal(error, param) from None


def refusal(error: GrammarError, param: str) -> ApiError:
    """422: a grammar that cannot be compiled."""
    return invalid(str(error), param=param, code="invalid_grammar")

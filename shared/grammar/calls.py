"""The grammar of an answer that may, or must, call tools: arguments follow the schemas of their functions.

Introduced in phase 12. Invariant: a call in the right format has arguments that are valid under its function's schema,
if the schema is mandatory. If it is not mandatory, and is unsupported or costs more than half of the remaining budget,
the arguments are any object. If a call is the whole answer, an object that is written differently (other blanks, more
members) is free text, and the call reader treats it as such.
"""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from shared.grammar.answer_graph import AnswerGraph, CallMode, CallSpelling
from shared.grammar.automata.automaton import Automaton
from shared.grammar.automata.joining import joined
from shared.grammar.automata.spelling import spellable
from shared.grammar.documents.json_schema import compile_schema
from shared.grammar.limits import Budget, GrammarError, WorkError


@dataclass(frozen=True)
class CalledFunction:
    """A function: its name, the JSON schema of its arguments, and whether they must follow it."""

    name: str
    schema: Any
    is_strict: bool


@dataclass(frozen=True)
class CallDescription:
    """The allowed form of an answer."""

    mode: CallMode
    spelling: CallSpelling
    functions: tuple[CalledFunction, ...]
    answer: tuple[str, str] | None = None  # kind and text of the grammar for the text outside calls; None: free text
    is_closed: bool = False  # as in ``compile_schema``, for arguments

    @property
    def text(self) -> str:
        """As JSON."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False)

    @classmethod
    def of_text(cls, text: str) -> Self:
        fields = json.loads(text)
        spelling = fields["spelling"]
        spelling["thought"] = spelling["thought"] and tuple(spelling["thought"])
        functions = tuple(CalledFunction(**each) for each in fields["functions"])
        answer = fields["answer"] and tuple(fields["answer"])
        return cls(CallMode(fields["mode"]), CallSpelling(**spelling), functions, answer, fields["is_closed"])


def compile_calls(
    description: CallDescription, answer: Automaton | None, usable_bytes: NDArray[np.bool_], budget: Budget
) -> Automaton:
    """The automaton of the answers; ``answer`` is that of ``description.answer``. Raises GrammarError."""

    def compiled(schema: Any, budget: Budget) -> Automaton:
        automaton = compile_schema(schema, budget, is_closed=description.is_closed)
        found = spellable(automaton, usable_bytes, budget)
        budget.keep(found.num_states)
        return found

    functions = description.functions if description.mode is not CallMode.NONE else ()
    free = [index for index, each in enumerate(functions) if not each.is_strict]
    names = [each.name for each in description.functions]
    arguments = {}
    if free:  # computed before others spend the budget
        some_object = compiled({"type": "object"}, budget)
        arguments = dict.fromkeys(free, some_object)
        budget.keep(some_object.num_states * (len(free) - 1))
    for index, each in enumerate(functions):
        if each.is_strict:
            try:
                arguments[index] = compiled(_of_object(each.schema), budget)
            except GrammarError as error:
                raise type(error)(f"The arguments of {each.name}: {error}") from error
    reserve = (budget.limits.work - budget.work) // 4  # for joining them, however many attempts fail
    for index in free:
        try:
            with budget.attempt(reserve) as part:
                arguments[index] = compiled(_of_object(functions[index].schema), part)
        except WorkError:
            if not budget.limits.drops:
                raise
        except GrammarError:
            pass  # arguments are any object
    budget.spend(sum(32 * len(name) for name in names) + sum(each.num_bytes for each in arguments.values()) // 64)
    around = AnswerGraph(description.mode, description.spelling, names, has_format=answer is not None)
    ordered = [arguments[index] for index in range(len(functions))]
    return joined(around.graph, ordered, around.behind, answer, around.beginnings)


def _of_object(schema: Any) -> Any:
    """The schema, restricted to objects, since arguments are always an object."""
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise GrammarError('the schema must be of an object; say "type": "object".')
    return {"type": "object", **schema}

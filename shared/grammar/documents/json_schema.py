"""Compiles a JSON Schema to an automaton over the bytes of its documents. Introduced in phase 12.

Schemas are read (``schema_document``), their logic is resolved into shapes (``disjuncts``), and shapes become rules
(``values``) of an automaton with a stack. Every accepted document is valid. Keys may come in any order; a space, or a
line break with blanks, may separate two parts; nothing may surround the document; and strings use only the escapes of
``json.dumps``.
"""

from dataclasses import dataclass

from shared.grammar.automata.assembler import Assembler
from shared.grammar.automata.automaton import Automaton
from shared.grammar.documents.values import Values
from shared.grammar.limits import Budget
from shared.grammar.schema.document import SchemaDocument


def compile_schema(schema: object, budget: Budget, *, is_closed: bool = False) -> Automaton:
    """The automaton of the documents that are valid under a JSON Schema (drafts 4 to 2020-12).

    ``is_closed``: objects whose schema names properties, and says nothing about others, have no others. Raises
    GrammarError, with the keyword and its location, for a schema that is invalid, too large, accepts nothing, or uses
    unsupported features.
    """
    document = SchemaDocument(schema, budget, is_closed=is_closed)
    try:
        root = frozenset({document.literal(schema, "#")})
        values = Values(document, budget)
        end = End(values.assembler)
        values.assembler.state("root", lambda: values.entries((root,), end))
        values.assembler.final.add(end.after(1))
        return values.assembler.finish()
    except RecursionError:
        raise document.error("#", "the schema refers to itself without end, or is nested too deeply") from None


def compile_json(budget: Budget) -> Automaton:
    """The automaton of all JSON objects."""
    return compile_schema({"type": "object"}, budget)


@dataclass(frozen=True)
class End:
    """The end of the document."""

    assembler: Assembler

    def after(self, bits: int) -> int:
        return self.assembler.state("end", dict)

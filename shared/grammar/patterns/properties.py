"""The Unicode properties that a pattern may name: ``\\p{Lu}``, ``\\p{Uppercase_Letter}``, ``\\p{Script=Greek}``.

General categories come from Python's ``unicodedata``, which has no scripts. Introduced in phase 12.
"""

import sys
import unicodedata
from functools import cache, lru_cache
from itertools import groupby

from shared.grammar.patterns.characters import ANY, Characters, Range, characters, complement
from shared.grammar.patterns.scripts import scripts

_LONG_NAMES = """
Cased_Letter=LC Close_Punctuation=Pe Combining_Mark=M Connector_Punctuation=Pc Control=Cc Currency_Symbol=Sc
Dash_Punctuation=Pd Decimal_Number=Nd Enclosing_Mark=Me Final_Punctuation=Pf Format=Cf Initial_Punctuation=Pi
Letter=L Letter_Number=Nl Line_Separator=Zl Lowercase_Letter=Ll Mark=M Math_Symbol=Sm Modifier_Letter=Lm
Modifier_Symbol=Sk Nonspacing_Mark=Mn Number=N Open_Punctuation=Ps Other=C Other_Letter=Lo Other_Number=No
Other_Punctuation=Po Other_Symbol=So Paragraph_Separator=Zp Private_Use=Co Punctuation=P Separator=Z
Space_Separator=Zs Spacing_Mark=Mc Symbol=S Titlecase_Letter=Lt Unassigned=Cn Uppercase_Letter=Lu cntrl=Cc digit=Nd
punct=P
"""
LONG_NAMES = dict(pair.split("=") for pair in _LONG_NAMES.split())


@lru_cache(512)
def property_members(text: str) -> Characters | None:
    """The characters that have a property, written as in ``\\p{…}``; None if it is unknown."""
    name, equals, value = text.partition("=")
    if not equals:
        known = {"Any": ANY, "ASCII": characters([(0, 127)])}
        return known.get(text) or (_assigned() if text == "Assigned" else _category(text))
    if name in ("General_Category", "gc"):
        return _category(value)
    members = scripts().get(value) if name in ("Script", "sc") else None
    return None if members is None else complement(characters((*complement(members), *complement(_assigned()))))


def _category(name: str) -> Characters | None:
    return _categories().get(LONG_NAMES.get(name, name))


def _assigned() -> Characters:
    return complement(_categories()["Cn"])


@cache
def _categories() -> dict[str, Characters]:
    """The characters of each general category such as ``Lu`` or ``L``; takes about 0.3 s, once."""
    found: dict[str, list[Range]] = {}
    for kind, group in groupby(range(sys.maxunicode + 1), lambda code: unicodedata.category(chr(code))):
        first, *others = group
        for name in (kind, kind[0], *(["LC"] if kind in ("Lu", "Ll", "Lt") else [])):
            found.setdefault(name, []).append((first, others[-1] if others else first))
    return {name: members for name, ranges in found.items() if (members := characters(ranges))}

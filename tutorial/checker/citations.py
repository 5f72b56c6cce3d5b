"""Numbers in the text that were measured, and the reports they come from.

After the number, in a comment that a renderer does not show, is its source::

    15.3<!-- {{report:FILE#KEY}} --> times        1,144<!-- {{report:FILE#results.02.tokens_computed}} -->
    3.5×<!-- {{report:FILE#A / FILE#B}} -->       12 %<!-- {{report:FILE#A * 100}} -->

FILE lies in ``benchmarks/reports``, KEY is as in `benchmarks.report.read_value` and may hold spaces; a FILE left out
is the one before it. ``*`` and ``/``, with spaces around, combine values and plain numbers from left to right. The
number shown must be the value, rounded to the digits it shows. Commas between thousands do not count, nor do ``×``,
``%``, ``*`` or ``_`` after the number.
"""

import re
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

from benchmarks.report import read_value
from shared.errors import ConfigError
from tutorial.checker.chapter import Chapter, Edit, Problem

REPORTS = Path("benchmarks/reports")
_NUMBER = r"[-−]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"
_CITATION = re.compile(
    rf"(?P<number>(?<![\w.,]){_NUMBER})(?P<behind>(?:\s?[×%]|[*_]+)*)<!-- \{{\{{report:(?P<source>[^{{}}]+)\}}\}} -->"
)
_ANY = re.compile(r"\{\{\s*report\b")
_OPERAND = re.compile(r"(?P<file>[\w.-]*)#(?P<key>\S+(?: [\w.]+)*)|(?P<number>\d+(?:\.\d+)?)")
_CODE_SPAN = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)")
HOW = "write it as NUMBER<!-- {{report:FILE#KEY}} -->, with nothing between the number and the comment"


def cited_lines(chapter: Chapter) -> list[int]:
    """The lines with a citation, well formed or not."""
    return [number for number, line in enumerate(_text(chapter), start=1) if _ANY.search(line)]


def check_citations(chapter: Chapter, line_number: int, root: Path) -> list[Problem]:
    """Compare each number cited on a line with its report; one edit puts all of them right."""
    line = _text(chapter)[line_number - 1]
    problems: list[str] = []
    wrong: list[str] = []
    fixed = chapter.lines[line_number - 1]
    found = list(_CITATION.finditer(line))
    if len(_ANY.findall(line)) != len(found):
        problems.append(f"a citation that cannot be read; {HOW}")
    for match in reversed(found):
        try:
            value = evaluate(match["source"], root / REPORTS)
        except ConfigError as error:
            problems.append(str(error))
            continue
        if not agrees(match["number"], value):
            better = rounded_like(match["number"], value)
            wrong.insert(0, f"{match['number']} is shown, and {match['source']} is {value}, which makes {better}")
            fixed = fixed[: match.start("number")] + better + fixed[match.end("number") :]
    listed = [Problem(line_number, message) for message in problems]
    if wrong:
        message = "\n    ".join(["numbers that are not those of the report:", *wrong])
        listed.append(Problem(line_number, message, Edit(line_number, line_number, (fixed,))))
    return listed


def evaluate(source: str, folder: Path) -> Decimal:
    """The value of ``FILE#KEY``, or of several combined; raises ConfigError with what is wrong."""
    words = re.split(r" ([*/])(?: |$)", source)  # keys may hold spaces
    if "" in words:
        raise ConfigError(f"{source!r} cannot be read; a source is FILE#KEY, or several with ` / ` or ` * ` between.")
    result, file = Decimal(1), ""
    for operator, word in zip(["*", *words[1::2]], words[::2], strict=True):
        operand = _OPERAND.fullmatch(word)
        if operand is None:
            raise ConfigError(f"{word!r} is neither FILE#KEY nor a number.")
        if operand["key"] is None:
            value = Decimal(operand["number"])
        else:
            file = operand["file"] or file
            if not file:
                raise ConfigError(f"{word!r} names no report; only a source behind another one may leave it out.")
            value = _measured(folder / file, operand["key"])
        if operator == "/" and not value:
            raise ConfigError(f"{source!r} divides by {word}, which is 0.")
        result = result / value if operator == "/" else result * value
    return result


def agrees(shown: str, value: Decimal) -> bool:
    """Whether the value, rounded to the digits of ``shown``, is what is shown; a tie may go either way."""
    return abs(_decimal(shown) - value) <= Decimal(1).scaleb(-_digits(shown)) / 2


def rounded_like(shown: str, value: Decimal) -> str:
    """The value with as many digits after the point as ``shown``, and commas if it has some or needs none."""
    rounded = value.quantize(Decimal(1).scaleb(-_digits(shown)), ROUND_HALF_UP) + 0  # no minus before a zero
    has_thousands = len(shown.lstrip("-−").partition(".")[0]) > 3
    commas = "," in shown or not has_thousands
    text = f"{rounded:,f}" if commas else f"{rounded:f}"
    return text.replace("-", "−") if "−" in shown else text


def _measured(path: Path, key: str) -> Decimal:
    value = read_value(path, key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{path.name}#{key} is {value!r}, no number.")
    return Decimal(repr(value))


def _decimal(shown: str) -> Decimal:
    return Decimal(shown.replace(",", "").replace("−", "-"))


def _digits(shown: str) -> int:
    return len(shown.partition(".")[2])


def _text(chapter: Chapter) -> list[str]:
    """The page's prose, with spaces in the place of code spans, which may show how a citation is written."""
    return [_CODE_SPAN.sub(lambda match: " " * len(match[0]), line) for line in chapter.prose]

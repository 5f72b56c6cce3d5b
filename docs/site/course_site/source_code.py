"""Code in little HTML, for source pages, differences and folded quotes. Introduced in phase 3.

Lines by the hundred thousand make the size of the site. So a line of a source page is an element without an end tag,
whose anchor is its number and is shown as such, and a colour is an element without a class. The style sheet that gives
them their looks is written here, from the styles of `course_site.code_style`. Invariant: the text of a line is that of
its source.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pygments.lexers import get_lexer_for_filename
from pygments.style import Style
from pygments.token import Comment, Keyword, Name, Number, Operator, String, _TokenType
from pygments.util import ClassNotFound
from sphinx.application import Sphinx

from course_site.code_lines import indent
from course_site.code_style import Dark, Light
from course_site.folds import Line, joined
from course_site.repository import anchor

ELEMENTS: dict[_TokenType, str] = {
    Comment: "i",
    Keyword: "b",
    Keyword.Constant: "u",
    Operator.Word: "b",
    Name.Function: "dfn",
    Name.Class: "dfn",
    Name.Decorator: "var",
    Name.Tag: "em",
    String: "q",
    String.Doc: "samp",
    String.Interpol: "u",
    Number: "u",
}
"""What holds a token; types with one element look the same. The rest, punctuation too, has the colour of text."""
STYLE_SHEET = "source.css"
MAX_INDENT = 40
"""Columns; a line that stands further to the right hangs from there."""


@dataclass(frozen=True)
class NumberedLine(Line):
    """A line whose anchor is its number."""

    @property
    def html(self) -> str:
        columns = min(indent(self.code), MAX_INDENT)
        return f"<dd{self.attributes}{f' class=i{columns}' if columns else ''}>{self.code}\n"


def listed(lines: Iterable[Line]) -> str:
    """The HTML of numbered lines; a fold ends the line before it, which has no end tag."""
    return joined(lines).replace("<details", "</dd><details")


def numbered(number: int, code: str, exercise: str | None) -> Line:
    """Line ``number`` of a file, counted from 1; ``code`` is its HTML."""
    return NumberedLine(code, exercise, attributes=f" id={anchor(number)}")


@cache
def coloured(text: str, path: str) -> tuple[str, ...]:
    """A file's lines as HTML, coloured by what its name says that it is."""
    try:
        lexer = get_lexer_for_filename(path, stripnl=False, ensurenl=False)
    except ClassNotFound:
        return plain(text)
    lines = [""]
    open_element = ""
    for element, piece in _pieces(lexer.get_tokens(text)):
        for index, part in enumerate(piece.split("\n")):
            if index:
                lines[-1] += _closing(open_element)
                lines.append("")
                open_element = ""
            if part.strip() and element != open_element:
                lines[-1] += _closing(open_element) + (f"<{element}>" if element else "")
                open_element = element
            lines[-1] += _escaped(part)
    lines[-1] += _closing(open_element)
    return tuple(lines)


def plain(text: str) -> tuple[str, ...]:
    """A file's lines as HTML without colours."""
    return tuple(_escaped(text).split("\n"))


def style_sheet(light: dict[str, str], dark: dict[str, str]) -> str:
    """The theme's variables and the colours of code, for light and for dark."""
    of_light, of_dark = (_variables(style, names) for style, names in ((Light, light), (Dark, dark)))
    rules = [
        f"body{{{of_light}}}",
        ".highlight{color:var(--color-code-foreground)}",
        f'@media not print{{body[data-theme="dark"]{{{of_dark}}}',
        f'@media (prefers-color-scheme:dark){{body:not([data-theme="light"]){{{of_dark}}}}}}}',
    ]
    for element, token in {element: token for token, element in ELEMENTS.items()}.items():
        look = Light.style_for_token(token)
        weight, slope = "bold" if look["bold"] else "normal", "italic" if look["italic"] else "normal"
        rules.append(f".highlight {element}{{color:var(--code-{element});font-weight:{weight};font-style:{slope}}}")
    rules += [f".source .i{columns}{{--indent:{columns}}}" for columns in range(1, MAX_INDENT + 1)]
    return "\n".join(rules) + "\n"


def _pieces(tokens: Iterable[tuple[_TokenType, str]]) -> Iterator[tuple[str, str]]:
    for token, text in tokens:
        kind: _TokenType | None = token
        while kind is not None and kind not in ELEMENTS:
            kind = kind.parent
        yield ELEMENTS[kind] if kind is not None else "", text


def _escaped(text: str) -> str:
    """The text as HTML, where ``>`` and quotes stand for themselves."""
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _closing(element: str) -> str:
    return f"</{element}>" if element else ""


def _variables(style: type[Style], names: dict[str, str]) -> str:
    colours = {f"code-{element}": f"#{style.style_for_token(token)['color']}" for token, element in ELEMENTS.items()}
    code = {"color-code-background": style.background_color, "color-code-foreground": _text_colour(style)}
    return ";".join(f"--{name}:{value}" for name, value in (names | code | colours).items())


def _text_colour(style: type[Style]) -> str:
    return f"#{style.style_for_token(Name)['color']}"


def _write(app: Sphinx) -> None:
    options = app.config.html_theme_options
    sheet = Path(app.outdir, "_static", STYLE_SHEET)
    sheet.parent.mkdir(parents=True, exist_ok=True)
    sheet.write_text(style_sheet(options["light_css_variables"], options["dark_css_variables"]), encoding="utf-8")


def register(app: Sphinx) -> None:
    app.add_css_file(STYLE_SHEET)
    app.connect("builder-inited", _write)

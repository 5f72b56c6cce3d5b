"""Lines of code that wrap: a long line goes on below itself, indented, with a mark. Introduced in phase 3.

Pygments' formatter writes a block as one text. Here each line is an element that knows how far it is indented, so that
the style sheet can hang its continuation. Invariant: the text of a block is that of its source, line ends included.
"""

import re
from collections.abc import Iterator
from html import unescape

from pygments.formatters import HtmlFormatter
from sphinx.application import Sphinx
from sphinx.highlighting import PygmentsBridge

_TAG = re.compile(r"<[^>]*>")
_COLUMNS = re.compile(r"[│┃─━]|\S {3,}\S")


def in_columns(text: str) -> bool:
    """Whether a text is set in columns, or drawn with lines, and so loses its sense when it wraps."""
    return _COLUMNS.search(text) is not None


def indent(html: str) -> int:
    """How many columns the line whose HTML this is stands to the right; 0 for a blank one."""
    text = _text(html)
    return len(text) - len(text.lstrip(" ")) if text.strip() else 0


def hanging(html: str) -> str:
    """The style of a line whose HTML this is: how many columns it is indented."""
    return f' style="--indent: {columns}"' if (columns := indent(html)) else ""


class LineFormatter(HtmlFormatter[str]):
    """A block of code, each of its lines a block of its own."""

    def wrap(self, source: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
        lines = ((kind, f'<span class="{_classes(line)}"{hanging(line)}>{line}</span>') for kind, line in source)
        wrapped: Iterator[tuple[int, str]] = super().wrap(lines)
        return wrapped


def _text(html: str) -> str:
    return unescape(_TAG.sub("", html))


def _classes(html: str) -> str:
    return "line columns" if in_columns(_text(html)) else "line"


def register(app: Sphinx) -> None:
    PygmentsBridge.html_formatter = LineFormatter

"""Numbers stay on the line of their units, and of the number before them in a row of several. Introduced in phase 3.

    155.2 µs        3.4 / 5.6 / 155.2 µs

Markdown has plain spaces there, at which a narrow column of a table breaks. Invariant: a page's text is that of its
Markdown, but for the kind of some spaces.
"""

import re

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

NO_BREAK = "\N{NO-BREAK SPACE}"
_UNIT = r"(?:[µmn]?s|%|×|[KMGT]i?B(?:/s)?|\w+/s|bits?|million|[GM]Hz|W)(?!\w)"
_BEFORE = re.compile(rf"(?<=\d) (?={_UNIT}|/ \d)")
_AFTER_A_LINK = re.compile(rf"^ (?={_UNIT}|/ ?)")


class Units(SphinxTransform):
    """Spaces before units and slashes that do not break."""

    default_priority = 440  # after figures have become links to their reports

    def apply(self, **kwargs: object) -> None:
        for parent in list(self.document.findall(nodes.TextElement)):
            if isinstance(parent, nodes.FixedTextElement | nodes.literal | nodes.raw | nodes.comment):
                continue
            for index, child in enumerate(parent.children):
                if isinstance(child, nodes.Text):
                    kept = _BEFORE.sub(NO_BREAK, child)
                    if index and parent[index - 1].astext()[-1:].isdigit():
                        kept = _AFTER_A_LINK.sub(NO_BREAK, kept)
                    parent[index] = nodes.Text(kept)


def register(app: Sphinx) -> None:
    app.add_transform(Units)

"""Pictures with captions, and diagrams that follow the site's light and dark. Introduced in phase 3.

The caption says where to look: it is the title that the Markdown gives a picture, or else the description inside the
diagram; the text in brackets stays what a screen reader says in the picture's place.

A diagram that asks ``prefers-color-scheme`` hears what the reader's system prefers, not what the site's switch says. So
the site carries such a file twice, with the question answered: once for light, once for dark; the theme shows the one
that fits. Invariant: the two differ from the file in the repository by the answered questions alone.
"""

import os
import re
from html import unescape
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

from course_site.repository import ROOT

ANSWERED = "pictures"
_QUESTION = re.compile(r"\(\s*prefers-color-scheme\s*:\s*(light|dark)\s*\)")
_DESCRIPTION = re.compile(r"<desc\b[^>]*>(.*?)</desc>", re.DOTALL)
_ALWAYS, _NEVER = "(min-width: 0)", "(max-width: 0)"


def answer(svg: str, scheme: str) -> str:
    """The picture for one colour scheme."""
    return _QUESTION.sub(lambda match: _ALWAYS if match[1] == scheme else _NEVER, svg)


def described(svg: str) -> str:
    """What a diagram says of itself."""
    found = _DESCRIPTION.search(svg)
    return unescape(found[1]) if found else ""


class Pictures(SphinxTransform):
    """A caption for each picture, and twins for those that ask for the colour scheme."""

    default_priority = 430

    def apply(self, **kwargs: object) -> None:
        for image in list(self.document.findall(nodes.image)):
            path, absolute = self.env.relfn2path(image["uri"], self.env.current_document.docname)
            if "://" in image["uri"] or not Path(absolute).is_file():
                continue
            place = image.parent if _is_alone(image) else image
            svg = Path(absolute).read_text(encoding="utf-8") if path.endswith(".svg") else ""
            twins = [image]
            if _QUESTION.search(svg):
                self.env.note_dependency(absolute)
                twins = [self._twin(image, Path(path), scheme) for scheme in ("light", "dark")]
            caption = image.attributes.pop("title", "") or described(svg) or image.get("alt", "")
            frame = nodes.container("", *twins, classes=["frame"])  # which scrolls where the screen is narrow
            figure = nodes.figure("", frame, nodes.caption("", caption), classes=["picture"])
            self.document.set_id(figure)  # which Sphinx wants of whatever has a caption
            place.replace_self(figure)

    def _twin(self, image: nodes.image, path: Path, scheme: str) -> nodes.image:
        """A copy of the image that shows the picture for one scheme, written where Sphinx can read it."""
        folder = Path(self.env.doctreedir) / ANSWERED
        folder.mkdir(parents=True, exist_ok=True)
        name = "-".join([*path.with_suffix("").parts, scheme])
        twin = folder / f"{name}.svg"
        twin.write_text(answer((ROOT / path).read_text(encoding="utf-8"), scheme), encoding="utf-8")
        copy = image.deepcopy()
        copy["uri"] = f"/{os.path.relpath(twin, ROOT)}"
        copy["classes"].append(f"only-{scheme}")
        return copy


def _is_alone(image: nodes.image) -> bool:
    """Whether a picture is all of its paragraph; a figure cannot stand inside one."""
    return isinstance(image.parent, nodes.paragraph) and len(image.parent) == 1


def register(app: Sphinx) -> None:
    app.add_transform(Pictures)

"""Diagrams that follow the site's light and dark. Introduced in phase 3.

A diagram that asks ``prefers-color-scheme`` hears what the reader's system prefers, not what the site's switch says. So
the site carries such a file twice, with the question answered: once for light, once for dark; the theme shows the one
that fits. Invariant: the two differ from the file in the repository by the answered questions alone.
"""

import os
import re
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

from course_site.repository import ROOT

ANSWERED = "pictures"
_QUESTION = re.compile(r"\(\s*prefers-color-scheme\s*:\s*(light|dark)\s*\)")
_ALWAYS, _NEVER = "(min-width: 0)", "(max-width: 0)"


def answer(svg: str, scheme: str) -> str:
    """The picture for one colour scheme."""
    return _QUESTION.sub(lambda match: _ALWAYS if match[1] == scheme else _NEVER, svg)


class Pictures(SphinxTransform):
    """Twins for pictures that ask for the colour scheme; a frame in which wide ones scroll on a narrow screen."""

    default_priority = 430

    def apply(self, **kwargs: object) -> None:
        for image in list(self.document.findall(nodes.image)):
            path, absolute = self.env.relfn2path(image["uri"], self.env.current_document.docname)
            if "://" in image["uri"] or not Path(absolute).is_file():
                continue
            twins = [image]
            if path.endswith(".svg") and _QUESTION.search(Path(absolute).read_text(encoding="utf-8")):
                self.env.note_dependency(absolute)
                twins = [self._twin(image, Path(path), scheme) for scheme in ("light", "dark")]
            frame = nodes.container(classes=["picture"])
            image.replace_self(frame)
            frame += twins

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


def register(app: Sphinx) -> None:
    app.add_transform(Pictures)

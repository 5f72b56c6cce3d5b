"""The labels of the diagrams can be read: each has a contrast of at least 4.5 with what is drawn below it.

The formula is that of WCAG 2. A label's ground is the paper of the page, light or dark, with every shape drawn before
the label that lies below its middle.
"""

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

from benchmarks import figure

ROOT = Path(__file__).parents[2]
DIAGRAMS = sorted([*(ROOT / "tutorial/images").glob("*.svg"), *(ROOT / "docs/images").glob("*.svg")])
PAPERS = {"light": ("#ffffff", "#fefdfb"), "dark": ("#0d1117", "#14171b")}
"""The ground of a page on GitHub and of the site."""
LEAST = 4.5
SVG = "{http://www.w3.org/2000/svg}"
WIDTH_OF_A_LETTER = 0.56  # of the font's size
FONT_SIZE = 14.0

Colour = tuple[float, float, float]
Looks = dict[str, dict[str, str]]


class Shape(NamedTuple):
    """The box of a filled shape, and its colour with its opacity."""

    left: float
    top: float
    right: float
    bottom: float
    fill: Colour
    opacity: float

    def over(self, ground: Colour) -> Colour:
        red, green, blue = (self.opacity * a + (1 - self.opacity) * b for a, b in zip(self.fill, ground, strict=True))
        return red, green, blue


def rgb(colour: str) -> Colour:
    red, green, blue = (int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5))
    return red, green, blue


def contrast(one: Colour, other: Colour) -> float:
    """The ratio of two colours' luminances, from 1 to 21."""

    def luminance(colour: Colour) -> float:
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    brighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (brighter + 0.05) / (darker + 0.05)


def looks(style: str, scheme: str) -> Looks:
    """What the style sheet says of each class; rules of one selector only, which is all that decides about fills."""
    plain, _, dark = style.partition("@media (prefers-color-scheme: dark)")
    found: Looks = {}
    for rules in (plain, dark if scheme == "dark" else ""):
        for name, body in re.findall(r"(?<![\w.-])\.([\w-]+) \{([^}]*)\}", rules):
            found.setdefault(name, {}).update(re.findall(r"([\w-]+): ([^;]+);", body))
    return found


def look(element: ElementTree.Element, classes: Looks, name: str) -> str | None:
    """A property of an element: of its classes, or its own attribute."""
    values = [classes[each][name] for each in element.get("class", "").split() if name in classes.get(each, {})]
    return values[-1] if values else element.get(name)


def box(element: ElementTree.Element) -> tuple[float, float, float, float] | None:
    value = {name: float(text) for name, text in element.items() if re.fullmatch(r"-?[\d.]+", text)}
    if element.tag == f"{SVG}rect":
        left, top = value.get("x", 0.0), value.get("y", 0.0)
        return left, top, left + value["width"], top + value["height"]
    if element.tag == f"{SVG}circle":
        return value["cx"] - value["r"], value["cy"] - value["r"], value["cx"] + value["r"], value["cy"] + value["r"]
    return None


def labels(diagram: Path, scheme: str) -> Iterator[tuple[str, float]]:
    """Each label, with its lowest contrast on the two papers."""
    root = ElementTree.fromstring(diagram.read_text(encoding="utf-8"))
    classes = looks("".join(style.text or "" for style in root.iter(f"{SVG}style")), scheme)
    shapes: list[Shape] = []
    for element in root.iter():
        fill = look(element, classes, "fill")
        if (edges := box(element)) and fill and fill.startswith("#"):
            if "box" not in element.get("class", "").split():  # an outline: the style sheet fills it with nothing
                shapes.append(Shape(*edges, rgb(fill), float(look(element, classes, "fill-opacity") or 1)))
        elif element.tag == f"{SVG}text":
            assert fill, f"{diagram.name}: {element.text} has no colour of its own"
            x, y = _middle(element, classes)
            grounds = [rgb(paper) for paper in PAPERS[scheme]]
            for shape in shapes:
                if shape.left <= x <= shape.right and shape.top <= y <= shape.bottom:
                    grounds = [shape.over(ground) for ground in grounds]
            yield "".join(element.itertext()), min(contrast(rgb(fill), ground) for ground in grounds)


def _middle(text: ElementTree.Element, classes: Looks) -> tuple[float, float]:
    size = float((look(text, classes, "font-size") or f"{FONT_SIZE}").removesuffix("px"))
    half = WIDTH_OF_A_LETTER * size * len("".join(text.itertext())) / 2
    shift = {"middle": 0.0, "end": -half}.get(look(text, classes, "text-anchor") or "", half)
    return float(text.attrib["x"]) + shift, float(text.attrib["y"]) - size / 3


@pytest.mark.parametrize("scheme", PAPERS)
@pytest.mark.parametrize("diagram", DIAGRAMS, ids=lambda path: path.stem)
def test_every_label_of_a_diagram_can_be_read(diagram: Path, scheme: str) -> None:
    measured = list(labels(diagram, scheme))
    assert measured
    faint = {text: round(ratio, 2) for text, ratio in measured if ratio < LEAST}
    assert not faint


def test_the_formula_is_that_of_the_guideline() -> None:
    assert contrast(rgb("#000000"), rgb("#ffffff")) == pytest.approx(21)
    assert contrast(rgb("#767676"), rgb("#ffffff")) == pytest.approx(4.54, abs=0.005)
    assert contrast(rgb("#d97706"), rgb("#ffffff")) == pytest.approx(3.19, abs=0.005)


def test_the_text_of_charts_can_be_read() -> None:
    assert min(contrast(rgb(text), rgb(figure.PAPER)) for text in (figure.INK, figure.QUIET)) >= LEAST


def test_the_picture_of_the_readme_shows_what_the_reports_say() -> None:
    script = runpy.run_path(str(ROOT / "docs/images/draw_phases.py"))
    drawn = (ROOT / "docs/images/phases.svg").read_text(encoding="utf-8")
    assert drawn == script["svg"](script["bars"]()), "run python docs/images/draw_phases.py"
    first, *_, last = (f"{bar.speed:,.0f}" for bar in script["bars"]())
    picture = re.search(r"!\[([^]]*)\]\(docs/images/phases\.svg\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert picture is not None
    assert re.findall(r"[\d,]{2,}(?= in phase)", picture[1]) == [first, last]

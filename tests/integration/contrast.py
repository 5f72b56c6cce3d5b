"""Contrast by the formula of WCAG 2: of each text in a part of a page against what lies behind it."""

import re
from typing import Any

# Of each element that has text of its own and is seen: the text, its colour, and the backgrounds from the inside out.
COLOURS = """root => [...root.querySelectorAll('*')].filter(element =>
    element.checkVisibility({ visibilityProperty: true })
    && [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim())
    && !element.closest('script, option')).map(element => {
    const behind = [];
    for (let at = element; at; at = at.parentElement) behind.push(getComputedStyle(at).backgroundColor);
    const style = getComputedStyle(element);
    return [element.textContent.trim().slice(0, 40), element instanceof SVGElement ? style.fill : style.color, behind];
})"""


def contrasts(part: Any) -> dict[str, float]:
    """The contrast of each text in the element of a locator, from 1 to 21."""
    return {text: contrast(colour, _behind(behind)) for text, colour, behind in part.evaluate(COLOURS)}


def contrast(one: str, other: str) -> float:
    """Of two colours such as ``rgb(31, 41, 55)``."""
    dark, light = sorted(map(_luminance, (one, other)))
    return (light + 0.05) / (dark + 0.05)


def _behind(backgrounds: list[str]) -> str:
    return next(colour for colour in backgrounds if colour.startswith("rgb("))  # rgba() is see-through


def _luminance(colour: str) -> float:
    shares = [int(part) / 255 for part in re.findall(r"\d+", colour)]
    red, green, blue = (share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue

"""Draws trace.png: the page of `infer trace` in a browser, two schedulers one below the other. Introduced in phase 4.

    python docs/images/record_trace.py [--model MODEL] [--phase PHASE] [--compare NAMES] [--dark] [--out FILE]

Further options are those of `infer trace`. The page is opened as a file, and a cell of the last timeline is chosen, or
of one timeline alone the step that its caption names; the picture reaches from the controls to what the page says about
that. Nothing is fetched.
"""

from playwright.sync_api import Page
from recording import add_model, capture, parser, shrink, trace, window

TRACED = ("--max-seq-len", "96")  # little memory, so that one sees how much of it a request fills
STEPS_TO_THE_RIGHT = 6  # of the first, for the chosen cell


def choose_cell(tab: Page) -> None:
    """Choose a cell of the last timeline's second request."""
    tab.locator(".scroller").last.focus()
    tab.keyboard.press("ArrowRight")
    for key in ("ArrowDown",) + ("ArrowRight",) * STEPS_TO_THE_RIGHT:
        tab.keyboard.press(key)
    tab.evaluate("document.activeElement.blur()")


def main() -> None:
    # The height of the whole page, which a picture of a lower window would cut off.
    arguments = parser("Draw the page of infer trace.", "trace.png", width=1400, height=2600)
    add_model(arguments)
    arguments.add_argument("--phase", default="05", help="whose engine runs (default: %(default)s)")
    arguments.add_argument("--compare", default="static,continuous", help="what is run (default: %(default)s)")
    options, settings = arguments.parse_known_args()

    settings += ["--phase", options.phase, *TRACED, *(["--compare", options.compare] if options.compare else [])]
    with trace(options.model, *settings) as address, window(options) as tab:
        tab.goto(address)
        if options.compare:
            choose_cell(tab)
        else:
            tab.locator("input[type=range]").dispatch_event("input")
        capture(tab, ".controls", "#details", options.out)
    shrink(options.out)


if __name__ == "__main__":
    main()

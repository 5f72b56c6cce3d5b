"""Draws playground.png: the server's page in a browser, at work. Introduced in phase 4.

    python docs/images/record_playground.py [--model MODEL] [--seconds S] [--dark] [--out FILE]

Requests of other clients give the charts something to show, and the page continues a text beside them. The KV cache
below has a picture of its own, pool.png. Nothing is fetched.
"""

import re

from playwright.sync_api import Page, expect
from recording import Server, add_model, capture, complete, parser, serving, shrink, window

SERVED = ("--num-gpu-blocks", "32", "--max-seq-len", "512")  # few blocks, so that their chart shows how many are held
SECONDS_BETWEEN_REQUESTS = 1.75
LAST = 8  # requests of the others after the page's own


def run_prompt(tab: Page) -> None:
    """Have the page continue a text, and show its tokens."""
    tab.fill("#prompt", "The three primary colours are")
    tab.fill("#max_tokens", "48")
    tab.check("#boundaries")
    tab.click("#run")


def work(tab: Page, server: Server, seconds: float) -> None:
    """Fill the charts for so long; the page's own answer is complete at the end."""
    tab.goto(server.url)
    number_of_requests = max(LAST, round(seconds / SECONDS_BETWEEN_REQUESTS))
    for number in range(number_of_requests):
        if number == number_of_requests - LAST:
            run_prompt(tab)
        complete(server, "Once upon a time", max_tokens=24 + 12 * (number % 4), seed=number)
        tab.wait_for_timeout(1000 * SECONDS_BETWEEN_REQUESTS)
    expect(tab.locator("#summary")).to_contain_text(re.compile("length|stop"), timeout=60_000)


def main() -> None:
    arguments = parser("Draw the server's page.", "playground.png", width=1400, height=860)
    add_model(arguments)
    arguments.add_argument("--seconds", type=float, default=90, help="how long the charts fill (default: %(default)s)")
    options = arguments.parse_args()

    with serving(options.model, *SERVED) as server, window(options) as tab:
        work(tab, server, options.seconds)
        capture(tab, "header", ".charts", options.out)
    shrink(options.out)


if __name__ == "__main__":
    main()

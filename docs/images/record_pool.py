"""Draws pool.png: the KV cache on the server's page, with few blocks and too many requests. Introduced in phase 6.

    python docs/images/record_pool.py [--model MODEL] [--dark] [--trace] [--out FILE]

The server's pool is too small for the requests; the picture is taken when a preempted request has been readmitted. With
--trace it is the page of `infer trace` for such a pool, at a step that recomputes a request. Nothing is downloaded.
"""

import argparse

from recording import add_model, capture, complete, parser, serving, shrink, trace, window

SERVED = ("--num-gpu-blocks", "48", "--block-size", "8", "--max-seq-len", "320")
TRACED = ("--num-gpu-blocks", "16", "--block-size", "6", "--max-seq-len", "96", "--requests", "8", "--max-tokens", "40")
SUBJECTS = ("the sea", "a small town", "an old clock", "the first snow", "two brothers", "a lighthouse")


def record_server(options: argparse.Namespace) -> None:
    """Save the panel at the moment described above."""
    with serving(options.model, *SERVED) as server, window(options) as tab:
        tab.goto(server.url)
        tab.locator("#memory-panel").scroll_into_view_if_needed()
        for number, subject in enumerate(SUBJECTS):
            prompt = f"Once upon a time there was {subject}, and"
            complete(server, prompt, max_tokens=120 + 20 * number, seed=number, ignore_eos=True)
        for state in ("preempted", "recompute"):
            tab.locator(f".pool-list li[data-state={state}]").first.wait_for(timeout=120_000)
        tab.locator("#memory-panel").screenshot(path=options.out)


def record_trace(options: argparse.Namespace) -> None:
    """Save the timeline and the KV cache after the first step that recomputes a request."""
    with trace(options.model, *TRACED) as address, window(options) as tab:
        tab.goto(address)
        again = tab.locator("rect.recompute").first
        if not again.count():
            raise SystemExit("No request was preempted; the pool is too large for this model.")
        tab.locator("input[type=range]").fill(str(again.get_attribute("data-first")))
        tab.evaluate("document.activeElement.blur()")
        capture(tab, ".controls", "#details", options.out)


def main() -> None:
    arguments = parser("Draw the KV cache.", "pool.png", width=1400, height=1400)
    add_model(arguments)
    arguments.add_argument("--trace", action="store_true", help="the page of infer trace instead of the server's")
    options = arguments.parse_args()

    draw = record_trace if options.trace else record_server
    draw(options)
    shrink(options.out)


if __name__ == "__main__":
    main()

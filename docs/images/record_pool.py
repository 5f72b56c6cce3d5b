"""Draws pool.png: the KV memory on the server's page, with few blocks and too many requests. Introduced in phase 6.

    python docs/images/record_pool.py [--model MODEL] [--dark] [--trace] [--out FILE]

A server is started as a user would start it, with a pool that several answers cannot share to their ends; the picture
is taken when somebody who was preempted has memory again. With --trace it is the page of `infer trace` for such a pool,
at a step in which somebody is recomputed. Nothing is fetched.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
INFER = [sys.executable, "-c", "from shared.cli import app; app(prog_name='infer')"]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
COLOURS = 256
SERVED = ("--num-gpu-blocks", "48", "--block-size", "8", "--max-seq-len", "320")
TRACED = ("--num-gpu-blocks", "16", "--block-size", "6", "--max-seq-len", "96", "--requests", "8", "--max-tokens", "40")
SUBJECTS = ("the sea", "a small town", "an old clock", "the first snow", "two brothers", "a lighthouse")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


@contextmanager
def serving(model: str) -> Iterator[tuple[str, str]]:
    """The address of a server of this model, and the model's name there."""
    command = [*INFER, "serve", model, "--port", "0", *SERVED]
    process = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        ready = next((line for line in process.stderr if '"ready"' in line), None)
        if ready is None:
            raise SystemExit(f"The server of {model} did not start.")
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield json.loads(ready)["url"], json.loads(ready)["model"]
    finally:
        process.terminate()
        process.wait(60)


def ask(url: str, model: str, number: int) -> None:
    """One long answer for a client that reads it."""
    prompt = f"Once upon a time there was {SUBJECTS[number % len(SUBJECTS)]}, and"
    body = {"model": model, "prompt": prompt, "max_tokens": 120 + 20 * number, "seed": number, "ignore_eos": True}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with suppress(OSError), urllib.request.urlopen(request) as response:  # the server may end first
        response.read()


def record_server(browser: Browser, model: str, window: dict[str, int], scheme: str, out: Path) -> None:
    """Save the panel at the moment described above."""
    with serving(model) as (url, name):
        tab = browser.new_page(viewport=window, color_scheme=scheme)
        tab.goto(url)
        tab.locator("#memory-panel").scroll_into_view_if_needed()
        for number in range(len(SUBJECTS)):
            threading.Thread(target=ask, args=(url, name, number), daemon=True).start()
        tab.locator(".pool-list li[data-state=preempted]").first.wait_for(timeout=120_000)
        tab.locator(".pool-list li[data-state=recompute]").first.wait_for(timeout=120_000)
        tab.locator("#memory-panel").screenshot(path=out)


def record_trace(browser: Browser, model: str, window: dict[str, int], scheme: str, out: Path) -> None:
    """Save the timeline and the memory after the first step that recomputes somebody."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*INFER, "trace", "--model", model, *TRACED, "--out", folder]
        subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, check=True)
        tab = browser.new_page(viewport=window, color_scheme=scheme)
        tab.goto((Path(folder) / "trace.html").as_uri())
        again = tab.locator("rect.recompute").first
        if not again.count():
            raise SystemExit("Nobody was preempted; the pool is too large for this model.")
        tab.locator("input[type=range]").fill(str(again.get_attribute("data-first")))
        tab.evaluate("document.activeElement.blur(); document.querySelector('section').scrollIntoView()")
        tab.screenshot(path=out)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the KV memory.")
    parser.add_argument("--model", default="smollm2-135m", help="a model folder or name (default: %(default)s)")
    parser.add_argument("--width", type=int, default=1400, help="of the window (default: %(default)s)")
    parser.add_argument("--height", type=int, default=1000, help="of the window (default: %(default)s)")
    parser.add_argument("--dark", action="store_true", help="the dark theme instead of the light one")
    parser.add_argument("--trace", action="store_true", help="the page of infer trace instead of the server's")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("pool.png"), help="the picture's file")
    options = parser.parse_args()

    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        raise SystemExit(f"There is no browser here; one of {', '.join(BROWSERS)} is needed.")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=executable, args=FLAGS)
        window = {"width": options.width, "height": options.height}
        draw = record_trace if options.trace else record_server
        draw(browser, options.model, window, "dark" if options.dark else "light", options.out)
        browser.close()
    picture = Image.open(options.out).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    picture.save(options.out, optimize=True)
    print(f"wrote {options.out.name} ({options.out.stat().st_size / 1000:.0f} kB)")


if __name__ == "__main__":
    main()

"""Draws playground.png: the server's page in a browser, at work. Introduced in phase 4.

    python docs/images/record_playground.py [--model MODEL] [--dark] [--out FILE]

A server is started as a user would start it; some requests of other clients give the charts something to show, and the
page is asked to continue a text. Nothing is fetched.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
COLOURS = 256


@contextmanager
def serving(model: str) -> Iterator[tuple[str, str]]:
    """The address of a server of this model, and the model's name there."""
    command = [
        sys.executable,
        "-c",
        "from shared.cli import app; app(prog_name='infer')",
        "serve",
        model,
        "--port",
        "0",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
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


def keep_busy(url: str, model: str, seconds: float) -> None:
    """Requests of other clients, one beginning every other second."""

    def ask(number: int) -> None:
        body = {"model": model, "prompt": "Once upon a time", "max_tokens": 16 + 12 * (number % 4), "seed": number}
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        with suppress(OSError), urllib.request.urlopen(request) as response:  # the server may end first
            response.read()

    ends = time.monotonic() + seconds
    number = 0
    while time.monotonic() < ends:
        threading.Thread(target=ask, args=(number,), daemon=True).start()
        number += 1
        time.sleep(2)


def work(tab: Page, url: str, model: str, seconds: float) -> None:
    """Let the page run for a while, and continue a text at the end of it."""
    tab.goto(url)
    threading.Thread(target=keep_busy, args=(url, model, seconds), daemon=True).start()
    tab.wait_for_timeout(1000 * max(0.0, seconds - 8))
    tab.fill("#prompt", "The three primary colours are")
    tab.fill("#max_tokens", "48")
    tab.check("#boundaries")
    tab.click("#run")
    expect(tab.locator("#summary")).to_contain_text(re.compile("length|stop"), timeout=60_000)
    tab.wait_for_timeout(1500)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the server's page.")
    parser.add_argument("--model", default="smollm2-135m", help="a model folder or name (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=45, help="how long the charts fill (default: %(default)s)")
    parser.add_argument("--width", type=int, default=1400, help="of the window (default: %(default)s)")
    parser.add_argument("--height", type=int, default=860, help="of the window (default: %(default)s)")
    parser.add_argument("--dark", action="store_true", help="the dark theme instead of the light one")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("playground.png"), help="the file")
    options = parser.parse_args()

    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        raise SystemExit(f"There is no browser here; one of {', '.join(BROWSERS)} is needed.")
    with serving(options.model) as (url, model), sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=executable, args=FLAGS)
        tab = browser.new_page(
            viewport={"width": options.width, "height": options.height},
            color_scheme="dark" if options.dark else "light",
        )
        work(tab, url, model, options.seconds)
        tab.screenshot(path=options.out)
        browser.close()
    picture = Image.open(options.out).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    picture.save(options.out, optimize=True)
    print(f"wrote {options.out.name} ({options.out.stat().st_size / 1000:.0f} kB)")


if __name__ == "__main__":
    main()

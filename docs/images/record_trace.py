"""Draws trace.png: the page of `infer trace` in a browser, two schedulers one below the other. Introduced in phase 4.

    python docs/images/record_trace.py [--model MODEL] [--compare NAMES] [--dark] [--out FILE]

The command is run as a user would run it, its page is opened as a file, and a cell is chosen. Nothing is fetched.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[2]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
COLOURS = 256
STEPS_TO_THE_RIGHT = 6  # of the first, for the chosen cell


def trace(model: str, compare: str, folder: Path) -> Path:
    """Run the command; the page it wrote."""
    code = "from shared.cli import app; app(prog_name='infer')"
    command = [sys.executable, "-c", code, "trace", "--model", model, "--compare", compare, "--out", str(folder)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    return folder / "trace.html"


def record(page: Path, *, width: int, height: int, is_dark: bool, out: Path) -> None:
    """Save the timelines, from the controls down, in a window of this size; a cell of the last one is chosen."""
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        raise SystemExit(f"There is no browser here; one of {', '.join(BROWSERS)} is needed.")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=executable, args=FLAGS)
        scheme = "dark" if is_dark else "light"
        tab = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        tab.goto(page.as_uri())
        tab.locator(".scroller").last.focus()
        tab.keyboard.press("ArrowRight")
        for key in ("ArrowDown",) + ("ArrowRight",) * STEPS_TO_THE_RIGHT:
            tab.keyboard.press(key)
        tab.evaluate("document.activeElement.blur(); document.querySelector('.controls').scrollIntoView()")
        tab.screenshot(path=out)
        browser.close()
    picture = Image.open(out).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    picture.save(out, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the page of infer trace.")
    parser.add_argument("--model", default="smollm2-135m", help="a model folder or name (default: %(default)s)")
    parser.add_argument("--compare", default="static,continuous", help="what is run (default: %(default)s)")
    parser.add_argument("--width", type=int, default=1400, help="of the window (default: %(default)s)")
    parser.add_argument("--height", type=int, default=1140, help="of the window (default: %(default)s)")
    parser.add_argument("--dark", action="store_true", help="the dark theme instead of the light one")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("trace.png"), help="the picture's file")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        page = trace(options.model, options.compare, Path(folder))
        record(page, width=options.width, height=options.height, is_dark=options.dark, out=options.out)
    print(f"wrote {options.out.name} ({options.out.stat().st_size / 1000:.0f} kB)")


if __name__ == "__main__":
    main()

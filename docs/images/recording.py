"""What the scripts that draw the pictures of this folder share. Introduced in phase 3.

    from recording import parser, shrink, window

    options = parser("Draw a page.", "page.png", width=1400, height=840).parse_args()
    with window(options) as tab:
        tab.goto(address)
        tab.screenshot(path=options.out)
    shrink(options.out)

Each script lies beside this module, which Python therefore finds by its name. Invariants: commands run as a user would
run them; servers, browsers and traces end with the block that asked for them.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from playwright.sync_api import Page

ROOT = Path(__file__).resolve().parents[2]
INFER = [sys.executable, "-c", "from shared.cli import app; app(prog_name='infer')"]  # from the folder ROOT
DEMO_MODEL = "smollm2-135m"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
MARGIN = 12  # pixels around what is captured


class Server(NamedTuple):
    """Where a server answers, and what it calls its model."""

    url: str
    model: str


def parser(purpose: str, out: str, *, width: int | None = None, height: int | None = None) -> argparse.ArgumentParser:
    """Options of a script: ``--out``, and those of a :func:`window` where its size is given."""
    arguments = argparse.ArgumentParser(description=purpose)
    arguments.add_argument("--out", type=Path, default=Path(__file__).with_name(out), help=f"the file (default: {out})")
    if width is not None and height is not None:
        arguments.add_argument("--width", type=int, default=width, help="of the window (default: %(default)s)")
        arguments.add_argument("--height", type=int, default=height, help="of the window (default: %(default)s)")
        arguments.add_argument("--dark", action="store_true", help="the dark theme instead of the light one")
    return arguments


def add_model(arguments: argparse.ArgumentParser) -> None:
    """Add the option ``--model``."""
    arguments.add_argument("--model", default=DEMO_MODEL, help="a model folder or name (default: %(default)s)")


@contextmanager
def window(options: argparse.Namespace, **settings: Any) -> "Iterator[Page]":
    """An empty page of a new Chromium, in the size and the theme of the options; settings are those of Playwright."""
    from playwright.sync_api import sync_playwright

    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        raise SystemExit(f"There is no browser here; one of {', '.join(BROWSERS)} is needed.")
    with sync_playwright() as driver, driver.chromium.launch(executable_path=executable, args=FLAGS) as browser:
        yield browser.new_page(
            viewport={"width": options.width, "height": options.height},
            color_scheme="dark" if options.dark else "light",
            **settings,
        )


@contextmanager
def serving(model: str, *settings: str) -> Iterator[Server]:
    """A server of this model that is ready; settings are options of ``infer serve``."""
    command = [*INFER, "serve", model, "--port", "0", *settings]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        ready = next((line for line in process.stderr if '"ready"' in line), None)
        if ready is None:
            raise SystemExit(f"The server of {model} did not start.")
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield Server(json.loads(ready)["url"], json.loads(ready)["model"])
    finally:
        process.terminate()
        process.wait(60)


def complete(server: Server, prompt: str, **parameters: Any) -> None:
    """Send a completion request as another client, and return at once; the response is discarded."""
    body = {"model": server.model, "prompt": prompt, **parameters}
    request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")

    def answer() -> None:
        with suppress(OSError), urllib.request.urlopen(request) as response:  # the server may end first
            response.read()

    threading.Thread(target=answer, daemon=True).start()


@contextmanager
def trace(model: str, *settings: str) -> Iterator[str]:
    """The address of a page that ``infer trace`` wrote; settings are options of the command."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*INFER, "trace", "--model", model, *settings, "--out", folder], cwd=ROOT, check=True)
        yield (Path(folder) / "trace.html").as_uri()


def capture(tab: "Page", first: str, last: str, file: Path) -> None:
    """Save a page from the upper edge of one element to the lower edge of another; the window has room for both."""
    tab.evaluate("document.body.style.height = 'auto'")  # what fills the window and scrolls inside is shown whole
    boxes = [tab.locator(selector).bounding_box() for selector in (first, last)]
    assert boxes[0] is not None
    assert boxes[1] is not None
    top = max(0, boxes[0]["y"] - MARGIN)
    bottom = boxes[1]["y"] + boxes[1]["height"] + MARGIN
    width = tab.evaluate("innerWidth")
    tab.screenshot(path=file, clip={"x": 0, "y": top, "width": width, "height": bottom - top})


def shrink(file: Path) -> None:
    """Reduce a PNG to a palette, and say how large it is now."""
    from PIL import Image

    from benchmarks.figure import save_with_palette

    save_with_palette(Image.open(file), file)
    print(f"wrote {file.name} ({file.stat().st_size / 1000:.0f} kB)")

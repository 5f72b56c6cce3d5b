"""Draws site.png: a page of the site as a browser shows it. Introduced in phase 3.

    make docs && python docs/images/record_site.py [--page PAGE] [--at ANCHOR] [--dark] [--out FILE]

The built site is opened from its files in Chromium, scrolled to a place, and the window is saved with as few colours as
such a page needs. Nothing is fetched.
"""

import argparse
import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[2]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
COLOURS = 256


def record(page: Path, anchor: str, *, width: int, height: int, theme: str, out: Path) -> None:
    """Save what a window of this size shows of a page at one of its anchors."""
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        raise SystemExit(f"There is no browser here; one of {', '.join(BROWSERS)} is needed.")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=executable, args=FLAGS)
        tab = browser.new_page(viewport={"width": width, "height": height}, reduced_motion="reduce")
        tab.add_init_script(f"localStorage.setItem('theme', '{theme}')")
        tab.goto(f"{page.as_uri()}#{anchor}")
        tab.add_style_tag(content="html { scroll-behavior: auto !important }")
        tab.evaluate("place => document.getElementById(place).scrollIntoView()", anchor)
        tab.wait_for_timeout(300)  # the table of contents follows
        tab.screenshot(path=out)
        browser.close()
    picture = Image.open(out).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    picture.save(out, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw a page of the site.")
    parser.add_argument("--page", default="tutorial/phase_01a.html", help="below site/ (default: %(default)s)")
    parser.add_argument("--at", default="the-idea", help="the heading to begin with (default: %(default)s)")
    parser.add_argument("--width", type=int, default=1400, help="of the window (default: %(default)s)")
    parser.add_argument("--height", type=int, default=840, help="of the window (default: %(default)s)")
    parser.add_argument("--dark", action="store_true", help="the dark theme instead of the light one")
    parser.add_argument("--site", type=Path, default=ROOT / "site", help="the built site (default: site/)")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("site.png"), help="the picture's file")
    options = parser.parse_args()

    page = options.site.resolve() / options.page
    if not page.is_file():
        raise SystemExit(f"There is no {options.page} in {options.site}; run `make docs` first.")
    theme = "dark" if options.dark else "light"
    record(page, options.at, width=options.width, height=options.height, theme=theme, out=options.out)
    print(f"wrote {options.out} ({options.out.stat().st_size / 1000:.0f} kB)")


if __name__ == "__main__":
    main()

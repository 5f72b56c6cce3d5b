"""Draws site.png: a page of the site as a browser shows it. Introduced in phase 3.

    make docs && python docs/images/record_site.py [--page PAGE] [--at ANCHOR] [--dark] [--out FILE]

The built site is opened from its files in Chromium and scrolled to a place. Nothing is fetched.
"""

from pathlib import Path

from recording import ROOT, parser, shrink, window


def main() -> None:
    arguments = parser("Draw a page of the site.", "site.png", width=1400, height=840)
    arguments.add_argument("--page", default="tutorial/phase_01a.html", help="below site/ (default: %(default)s)")
    arguments.add_argument("--at", default="the-idea", help="the heading to begin with (default: %(default)s)")
    arguments.add_argument("--site", type=Path, default=ROOT / "site", help="the built site (default: site/)")
    options = arguments.parse_args()

    page = options.site.resolve() / options.page
    if not page.is_file():
        raise SystemExit(f"There is no {options.page} in {options.site}; run `make docs` first.")
    with window(options, reduced_motion="reduce") as tab:
        tab.add_init_script(f"localStorage.setItem('theme', '{'dark' if options.dark else 'light'}')")
        tab.goto(f"{page.as_uri()}#{options.at}")
        tab.add_style_tag(content="html { scroll-behavior: auto !important }")
        tab.evaluate("place => document.getElementById(place).scrollIntoView()", options.at)
        tab.wait_for_timeout(300)  # the table of contents follows
        tab.screenshot(path=options.out)
    shrink(options.out)


if __name__ == "__main__":
    main()

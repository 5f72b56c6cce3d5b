"""The site of `make docs`, built once and read in a real Chromium over loopback: pages, links, anchors, pictures.

The browser opens every document, a list of files, and a source file of each language; the links and anchors of the
other source files, hundreds of the same make, are read from the HTML. Nothing here needs the network, and the
browser is not let onto it. Where there is no Chromium these tests say so.
"""

import functools
import http.server
import json
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

import pytest

from shared.lesson_source import added_modules, diff_lines
from shared.lessons import Lesson, find_lesson, lessons

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DESKTOP, TABLET, PHONE = ({"width": width, "height": 900} for width in (1400, 768, 390))
LEFT = "net::ERR_ABORTED"  # a page was left before its icon had come
CONTRAST = 4.5
"""What WCAG 2.2 asks of text at level AA."""

LOOK = """() => JSON.stringify({
    ids: [...document.querySelectorAll('[id]')].map(element => element.id),
    links: [...document.querySelectorAll('a[href]')].map(link => link.href),
    empty: [...document.images].filter(image => !image.naturalWidth).map(image => image.src),
})"""
# What sticks out of the window, and no part of the article scrolls it into view. The theme lets the whole text scroll
# sideways before the page does; that counts as the page.
WIDE = """() => {
    const scrolls = element => element && element.tagName !== 'ARTICLE'
        && (/auto|scroll/.test(getComputedStyle(element).overflowX) || scrolls(element.parentElement));
    const wide = [...document.querySelectorAll('article *')]
        .filter(element => element.getBoundingClientRect().right > innerWidth + 1 && !scrolls(element));
    const whole = [document.documentElement, ...document.querySelectorAll('.content')];
    const page = whole.some(element => element.scrollWidth > innerWidth) ? ['the page'] : [];
    return [...page, ...wide.map(element => element.outerHTML.slice(0, 120))];
}"""
# Blocks of code that scroll sideways; on a phone those set in columns may, in a box of their own.
SCROLLED = """() => [...document.querySelectorAll('article .highlight pre')]
    .filter(block => !(innerWidth < 500 && block.closest('.drawn')))
    .filter(block => block.scrollWidth > block.clientWidth + 1)
    .map(block => block.textContent.slice(0, 80))"""
# The lowest contrast of the texts, those of code among them, with what is painted behind them.
FAINTEST = """() => {
    const channels = color => color.match(/[\\d.]+/g).map(Number);
    const light = ([r, g, b]) => [r, g, b].map(value => value / 255)
        .map(value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
        .reduce((sum, value, index) => sum + value * [0.2126, 0.7152, 0.0722][index], 0);
    const behind = element => {
        const painted = channels(getComputedStyle(element).backgroundColor);
        return painted.length === 4 && painted[3] === 0 ? behind(element.parentElement) : painted;
    };
    const code = '.highlight span, .highlight ins, .highlight del, .counts *';
    return [...document.querySelectorAll(`${code}, article p, article a, figcaption, .sidebar-tree a, .planned span`)]
        .filter(element => element.textContent.trim() && element.checkVisibility())
        .map(element => {
            const [a, b] = [light(channels(getComputedStyle(element).color)), light(behind(element))];
            return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), element.outerHTML.slice(0, 80)];
        })
        .reduce((least, found) => found[0] < least[0] ? found : least, [21, 'nothing']);
}"""


@dataclass
class Visit:
    """What was found on one page: its anchors, where it leads, what the browser complained of, and what of a document
    is wider than a window, by the window's width."""

    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    wide: dict[int, list[str]] = field(default_factory=dict)


class Visitor:
    """A tab that notes errors, failed requests, and requests to anywhere but ``origin``."""

    def __init__(self, page: Any, origin: str) -> None:
        self.page, self.origin = page, origin
        self.complaints: list[str] = []
        page.on("console", lambda message: self._note(message.type in ("error", "warning"), "console", message.text))
        page.on("pageerror", lambda error: self._note(True, "script", error))
        page.on("requestfailed", lambda request: self._note(request.failure != LEFT, "failed", request.url))
        page.on("response", lambda response: self._note(response.status >= 400, response.status, response.url))
        page.on("request", lambda request: self._note(not self._is_ours(request.url), "outside", request.url))

    def visit(self, url: str) -> Visit:
        self.complaints = []
        self.page.goto(url, wait_until="load")
        found = json.loads(self.page.evaluate(LOOK))
        empty = [f"picture: {source}" for source in found["empty"]]
        return Visit(set(found["ids"]), found["links"], [*self.complaints, *empty])

    def wide(self) -> dict[int, list[str]]:
        """What does not fit the windows, of the page that was visited last, with all that can be opened open."""
        self.page.evaluate("document.querySelectorAll('details').forEach(details => { details.open = true })")
        found = {}
        for window in (DESKTOP, TABLET, PHONE):
            self.page.set_viewport_size(window)
            found[window["width"]] = [*self.page.evaluate(WIDE), *self.page.evaluate(SCROLLED)]
        self.page.set_viewport_size(DESKTOP)
        return {width: elements for width, elements in found.items() if elements}

    def crawl(self, folder: Path) -> dict[str, Visit]:
        """Every page that links lead to from ``index.html``, by its address without the origin.

        Of the source files and lists of them, hundreds of the same make, one of each language is opened, and one list.
        """
        visits: dict[str, Visit] = {}
        languages: set[str] = set()
        waiting = ["index.html"]
        while waiting:
            name = waiting.pop()
            language = Path(name.removesuffix(".html")).suffix
            if name in visits or (is_source_file(name) and language in languages):
                continue
            languages |= {language} if is_source_file(name) else set()
            visits[name] = visit = self.visit(f"{self.origin}/{name}")
            visit.wide = {} if is_source_file(name) else self.wide()
            waiting += sorted(target for target in targets(visit, self.origin) if (folder / target).is_file())
        return visits

    def _is_ours(self, url: str) -> bool:
        return url.startswith((f"{self.origin}/", "data:"))

    def _note(self, applies: bool, kind: object, text: object) -> None:
        if applies:
            self.complaints.append(f"{kind}: {text}")


def read(url: str, html: str) -> Visit:
    """A page's anchors and links, without a browser."""
    links = map(unescape, re.findall(r'<a\b[^>]*\bhref="([^"]*)"', html))
    return Visit(
        ids=set(re.findall(r'\bid="([^"]*)"', html)),
        links=[url + link if link.startswith("#") else urljoin(url, link) for link in links],
    )


def is_source_file(name: str) -> bool:
    """Whether a page shows a source file or a list of them, as opposed to a document."""
    return name.startswith("source/")


def targets(visit: Visit, origin: str) -> set[str]:
    """The pages of the site that a page leads to."""
    pages = {unquote(urldefrag(link).url.removeprefix(f"{origin}/")) for link in visit.links if link.startswith(origin)}
    return {page for page in pages if page.endswith(".html")}


def broken_links(visits: dict[str, Visit], folder: Path, origin: str) -> list[str]:
    """The links of crawled pages that lead to no file of the site, or to no place on the page."""
    broken = []
    for name, visit in visits.items():
        for link in visit.links:
            if link.startswith(origin):
                url, anchor = urldefrag(link)
                target = unquote(url.removeprefix(f"{origin}/"))
                is_anchor = not anchor or target not in visits or unquote(anchor) in visits[target].ids
                if not (folder / target).is_file() or not is_anchor:
                    broken.append(f"{name}: {link}")
            elif not re.match(r"https?:|mailto:", link):
                broken.append(f"{name}: {link}")
    return broken


def build_command(site: Path, doctrees: Path) -> list[str]:
    """The command of `make docs`, with folders of our own."""
    recipe = re.search(r"^docs:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert recipe is not None
    words = shlex.split(next(line for line in recipe[1].splitlines() if "sphinx" in line))
    assert words[0] == "$(BIN)/python"
    assert {"-W", "--keep-going", "build/doctrees"} <= set(words)
    assert words[-1] == "site"
    return [sys.executable, *(str(doctrees) if word == "build/doctrees" else word for word in words[1:-1]), str(site)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; every warning of the build is an error."""
    pytest.importorskip("furo", reason="the site needs the extra 'docs': pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("built")
    command = build_command(folder / "site", folder / "doctrees")
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder / "site"


@pytest.fixture(scope="module")
def origin(site: Path) -> Iterator[str]:
    yield from serve(site)


def serve(folder: Path) -> Iterator[str]:
    """The address under which a folder is served while the caller needs it."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def visits(site: Path, browser: Any, origin: str) -> dict[str, Visit]:
    page = browser.new_page(viewport=DESKTOP)
    found = Visitor(page, origin).crawl(site)
    page.close()
    return found


@pytest.fixture(scope="module")
def pages(visits: dict[str, Visit], site: Path, origin: str) -> dict[str, Visit]:
    """Every page of the site: as the browser found it, or read from its HTML."""
    names = {str(path.relative_to(site)) for path in site.rglob("*.html")}
    unseen = {name: (site / name).read_text(encoding="utf-8") for name in names - set(visits)}
    return visits | {name: read(f"{origin}/{name}", html) for name, html in unseen.items()}


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    context = browser.new_context(viewport=DESKTOP, color_scheme="light")
    yield context.new_page()
    context.close()


def documents(site: Path) -> list[str]:
    """The pages that are made from Markdown."""
    return [str(path.relative_to(site)) for top in ("", "docs", "tutorial") for path in (site / top).glob("*.html")]


def diagrams() -> list[Path]:
    """The diagrams of the chapters that ask for the reader's colour scheme."""
    found = (ROOT / "tutorial" / "images").glob("*.svg")
    return [path for path in found if "prefers-color-scheme" in path.read_text(encoding="utf-8")]


def teaching_page(site: Path, lesson: Lesson) -> str:
    """The chapter of a phase, or its design page where there is no chapter."""
    pages = (f"tutorial/{lesson.folder.name}.html", f"docs/PHASE_{lesson.number.upper().replace('.', '_')}.html")
    return next(name for name in pages if (site / name).exists())


def printed_blocks(html: str) -> list[str]:
    """The text of each block of code."""
    blocks = re.findall(r'<div class="highlight"><pre>(.*?)</pre>', html, re.DOTALL)
    return [unescape(re.sub(r"<[^>]*>", "", block)) for block in blocks]


def test_the_browser_has_nothing_to_complain_of(visits: dict[str, Visit]) -> None:
    assert {name: visit.complaints for name, visit in visits.items() if visit.complaints} == {}


def test_every_link_and_anchor_leads_somewhere(pages: dict[str, Visit], site: Path, origin: str) -> None:
    assert broken_links(pages, site, origin) == []


def test_every_page_can_be_reached(visits: dict[str, Visit], pages: dict[str, Visit], origin: str) -> None:
    assert {name for name in pages if not is_source_file(name)} - set(visits) == {"search.html"}
    reached = {target for name, visit in pages.items() for target in targets(visit, origin) - {name}}
    assert set(pages) - reached - {"index.html"} == {"search.html"}


def test_the_crawl_notices_what_is_broken(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(
        "<a href='other.html#here'>x</a><a href='other.html#nowhere'>x</a><a href='gone.html'>x</a>"
        "<img src='gone.png'><script src='http://203.0.113.1/x.js'></script><script>console.error('oh')</script>"
        "<article><p style='width: 2000px'>wide</p><pre style='overflow: auto'><b>fine</b></pre></article>"
    )
    (tmp_path / "other.html").write_text("<p id='here'>here<script>throw new Error('thrown')</script>")
    page = browser.new_page(viewport=PHONE)
    for origin in serve(tmp_path):
        found = Visitor(page, origin).crawl(tmp_path)
        broken = [line.rpartition("/")[2] for line in broken_links(found, tmp_path, origin)]
    page.close()
    wide = found["index.html"].wide
    kinds = {line.partition(":")[0] for line in found["index.html"].complaints}
    assert {"console", "failed", "404", "outside", "picture"} <= kinds
    assert any(line.startswith("script: ") and "thrown" in line for line in found["other.html"].complaints)
    assert broken == ["other.html#nowhere", "gone.html"]
    assert {width: [element.partition(" ")[0] for element in elements] for width, elements in wide.items()} == {
        window["width"]: ["the", "<p"] for window in (DESKTOP, TABLET, PHONE)
    }


def test_pages_and_code_fit_the_window(visits: dict[str, Visit]) -> None:
    assert {name: visit.wide for name, visit in visits.items() if visit.wide} == {}


def test_a_wrapped_line_is_indented_marked_and_copied_as_it_is(site: Path, origin: str, browser: Any) -> None:
    page = browser.new_page(viewport=PHONE)
    page.goto(f"{origin}/source/phases/phase_03/engine.py.html")
    code = (ROOT / "phases/phase_03/engine.py").read_text(encoding="utf-8").splitlines()
    longest = max(code, key=len)
    line = page.locator(f"#L-{code.index(longest) + 1}")
    assert line.bounding_box()["height"] > 2 * page.locator("#L-1").bounding_box()["height"] * 0.9
    assert "↳" in line.evaluate("line => getComputedStyle(line, '::before').content")
    copied = page.locator(".highlight.source pre").evaluate(
        "block => { getSelection().selectAllChildren(block); return getSelection().toString() }"
    )
    page.close()
    assert longest.strip() in copied
    assert "↳" not in copied
    assert len(copied.rstrip().split("\n")) == len(code)


def test_the_landing_page_has_one_promise_one_picture_and_one_button(origin: str, page: Any) -> None:
    page.goto(f"{origin}/index.html")
    assert page.locator("h1").count() == 1
    pictures = page.locator("article img:visible")
    assert pictures.count() == 1
    assert "12 steps" in pictures.get_attribute("alt")
    assert page.locator("article a:visible:not(:has(img))").all_inner_texts() == ["Begin"]
    with page.expect_navigation():
        page.click("text=Begin")
    assert page.locator("h1").inner_text().startswith("How to use this course")


def test_every_picture_has_a_text_and_a_caption(site: Path) -> None:
    for name in documents(site):
        html = (site / name).read_text(encoding="utf-8")
        figures = re.findall(r"<figure\b.*?</figure>", html, re.DOTALL)
        assert html.count("<img ") == sum(figure.count("<img ") for figure in figures), name
        for figure in figures:
            assert all(re.findall(r'<img [^>]*\balt="([^"]+)"', figure)), figure
            caption = re.search(r"<figcaption>(.*?)</figcaption>", figure, re.DOTALL)
            assert caption is not None, figure
            assert len(re.sub(r"<[^>]*>", "", caption[1]).strip()) > 20, figure


def test_sessions_hold_no_pattern_of_the_checker(site: Path) -> None:
    pattern = re.compile(r"(?<!\S)\.\.\.(?!\S)")
    for name in documents(site):
        html = (site / name).read_text(encoding="utf-8")
        for block in re.findall(r'<div class="[^"]*highlight-(?:console|text)[^"]*".*?</pre>', html, re.DOTALL):
            assert not pattern.search(unescape(re.sub(r"<[^>]*>", "", block))), f"{name}: {block}"


def test_the_way_through_the_course(site: Path, origin: str, page: Any) -> None:
    page.goto(f"{origin}/tutorial/start.html")
    sections = page.eval_on_selector_all(".sidebar-tree .caption", "all => all.map(one => one.innerText.toLowerCase())")
    first = page.eval_on_selector(".sidebar-tree ul", "list => [...list.querySelectorAll('a')].map(link => link.href)")
    first = [unquote(link.removeprefix(f"{origin}/").removesuffix("#")) for link in first]
    chapters = [teaching_page(site, lesson) for lesson in lessons()]
    assert sections == ["the course", "teaching", "the design", "reference"]
    assert [name for name in first if name in chapters] == chapters
    pages = [page for chapter in chapters for page in (chapter.replace(".html", "_from_empty.html"), chapter)]
    whole = ("tutorial/start.html", *pages, "tutorial/beyond_one_machine.html")
    assert first == [name for name in whole if (site / name).exists()]


@pytest.mark.parametrize("lesson", lessons(), ids=lambda lesson: lesson.number)
def test_a_phase_page_shows_what_changed(lesson: Lesson, site: Path, origin: str, page: Any) -> None:
    page.goto(f"{origin}/{teaching_page(site, lesson)}")
    headings = page.eval_on_selector_all("h2", "all => all.map(heading => heading.firstChild.textContent)")
    modules = page.eval_on_selector_all("h2 ~ ul a.name, section > ul a.name", "all => all.map(a => a.textContent)")
    shown = page.eval_on_selector_all(".file-diff pre > :not(.hunk)", "all => all.map(line => line.textContent)")
    if lesson.previous is None:
        assert "The code of this phase" in headings
        assert shown == []
        assert set(lesson.adds) <= set(modules)
        return
    older = find_lesson(lesson.previous)
    assert f"What changed since phase {older.number}" in headings
    lines = [line for line in diff_lines(older, lesson) if not line.startswith(("@@", "--- phases/", "+++ phases/"))]
    assert [line.rstrip("\n") for line in shown] == lines
    assert set(added_modules(older, lesson)) <= set(modules)


def test_a_phase_page_shows_what_was_measured(site: Path, origin: str, page: Any) -> None:
    page.goto(f"{origin}/{teaching_page(site, find_lesson('03'))}")
    charts = page.eval_on_selector_all("article img", "all => all.map(image => image.src.split('/').pop())")
    assert any(re.fullmatch(r"ladder-.*\.png", chart) for chart in charts)
    reports = page.eval_on_selector_all("#measured a", "all => all.map(link => link.getAttribute('href'))")
    assert any(link.startswith("../benchmarks/reports/ladder-") for link in reports)
    assert any(link.startswith("../benchmarks/reports/generation-packed-") for link in reports)


def test_quoted_source_leads_to_its_line(site: Path) -> None:
    fence = re.compile(r'<div class="[^"]*fence-source[^>]*>(?:\s*<div class="code-block-caption">(.*?)</div>)?')
    for name in documents(site):
        for caption in fence.findall((site / name).read_text(encoding="utf-8")):
            link = re.search(r'href="([^"#]+)(?:#(L-\d+))?"', caption)
            path, *definition = re.findall(r'<span class="pre">([^<]+)</span>', caption)
            assert link is not None
            shown = (site / Path(name).parent / link[1]).read_text(encoding="utf-8")
            assert f"<title>{path} - infer</title>" in shown
            line = re.search(rf'<span class="line" id="{link[2]}"[^>]*>(.*)', shown) if definition else None
            assert not definition or (line and definition[0].rpartition(".")[2] in re.sub(r"<[^>]*>", "", line[1]))


def test_fences_show_what_stands_in_the_chapter(site: Path) -> None:
    fence = re.compile(r"^( *)```\w+[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
    for chapter in (ROOT / "tutorial").glob("*.md"):
        shown = printed_blocks((site / "tutorial" / f"{chapter.stem}.html").read_text(encoding="utf-8"))
        blocks = iter([[line.rstrip() for line in text.strip("\n").rstrip().split("\n")] for text in shown])
        for indent, body in fence.findall(chapter.read_text(encoding="utf-8")):
            lines = [line.removeprefix(indent).rstrip() for line in body.strip("\n").rstrip().split("\n")]
            if lines[0].startswith("--- "):  # of whole files: the caption names them, and a hunk is called by its line
                lines = [re.sub(r"^@@ -\d+(,\d+)? \+(\d+)(,\d+)? @@.*", r"line \2", line) for line in lines[2:]]
            if not lines[0].startswith(("+", "-", "line ")):
                lines = ["⋮" if line.strip() == "..." else re.sub(r"(?<!\S)\.{3}(?!\S)", "…", line) for line in lines]
            assert lines in blocks, f"{chapter.name}: {body}"


def test_each_measured_figure_leads_to_its_report(site: Path) -> None:
    for name in documents(site):
        source = ROOT / name.replace(".html", ".md")
        cited = re.findall(r"\{\{report:([^#}]+)\.json#", source.read_text(encoding="utf-8")) if source.exists() else []
        shown = (site / name).read_text(encoding="utf-8")
        links = re.findall(r'<a class="cited[^>]*href="\.\./benchmarks/reports/([^"]+)\.html" title="measured: ', shown)
        assert links == cited, name
        assert "{{report:" not in shown


@pytest.mark.parametrize("over", ["http", "file"])
def test_search_finds_a_word(over: str, site: Path, origin: str, page: Any) -> None:
    base = origin if over == "http" else site.as_uri()
    visitor = Visitor(page, base)
    assert visitor.visit(f"{base}/tutorial/start.html").complaints == []
    page.fill(".sidebar-search", "counter-based noise")
    page.press(".sidebar-search", "Enter")
    page.wait_for_selector("#search-results li a")
    page.wait_for_function("!document.querySelector('#search-results h2').innerText.includes('Searching')")
    found = page.eval_on_selector_all("#search-results li a", "all => all.map(link => link.getAttribute('href'))")
    assert any("docs/OVERALL_DESIGN.html" in link or "docs/PHASE_02.html" in link for link in found)
    assert visitor.complaints == []


def test_dark_mode_switches_and_stays(site: Path, origin: str, page: Any) -> None:
    pictured = [name for name in documents(site) if "only-dark" in (site / name).read_text(encoding="utf-8")]
    assert bool(pictured) == bool(diagrams())
    name = pictured[0] if pictured else "tutorial/start.html"
    page.goto(f"{origin}/{name}")
    paper = "getComputedStyle(document.querySelector('.main')).getPropertyValue('--color-background-primary')"
    shown = "all => all.filter(image => image.offsetWidth > 0).length"
    light = page.evaluate(paper)
    if pictured:
        assert page.eval_on_selector_all("img.only-light", shown) > 0
        assert page.eval_on_selector_all("img.only-dark", shown) == 0
    for _ in range(3):
        if page.evaluate("document.body.dataset.theme") != "dark":
            page.click(".theme-toggle-content .theme-toggle")
    assert page.evaluate("document.body.dataset.theme") == "dark"
    assert page.evaluate(paper) != light
    page.reload()
    assert page.evaluate("document.body.dataset.theme") == "dark"
    if pictured:
        assert page.eval_on_selector_all("img.only-light", shown) == 0
        assert page.eval_on_selector_all("img.only-dark", shown) > 0


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_code_and_differences_can_be_read(theme: str, site: Path, origin: str, page: Any) -> None:
    page.add_init_script(f"localStorage.setItem('theme', '{theme}')")
    chapters = [teaching_page(site, find_lesson(number)) for number in ("03.1", "06")]
    for name in ("index.html", "docs/API.html", *chapters):
        page.goto(f"{origin}/{name}")
        contrast, where = page.evaluate(FAINTEST)
        assert contrast >= CONTRAST, where


def test_a_diagram_differs_in_its_colour_scheme_alone(site: Path) -> None:
    folder = site / "_images"
    twins = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*-light.svg")}
    assert set(twins) == {f"tutorial-images-{diagram.stem}-light.svg" for diagram in diagrams()}
    for name, light in twins.items():
        dark = (folder / name.replace("-light.svg", "-dark.svg")).read_text(encoding="utf-8")
        assert light != dark
        assert "prefers-color-scheme" not in light + dark
        assert len({re.sub(r"\((?:min|max)-width: 0\)", "", text) for text in (light, dark)}) == 1

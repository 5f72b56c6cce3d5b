"""The site of `make docs`, built once and read in a real Chromium over loopback: pages, links, anchors, pictures.

The browser opens every document once, a source file of each language and a report of each benchmark; the links and
anchors of the others, hundreds of the same make, are read from the HTML. Nothing here needs the network, and the
browser is not let onto it. Where there is no Chromium these tests say so.
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from shared.lesson_source import added_modules, diff_lines
from shared.lessons import Lesson, find_lesson, lessons
from tests.exercise_lines import given_away
from tests.integration.crawled_site import Visit, broken_links, crawl, make_of, read, serving, targets
from tests.integration.tabs import CONTRASTS, PHONE, expect, opened
from tutorial.workshop.exercises import exercises

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]


def build_command(site: Path, doctrees: Path) -> list[str]:
    """The command of `make docs`, with folders of our own."""
    recipe = re.search(r"^docs:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert recipe is not None
    words = shlex.split(next(line for line in recipe[1].splitlines() if "sphinx" in line))
    assert words[0] == "$(BIN)/python"
    assert {"-W", "--keep-going", "build/doctrees"} <= set(words)
    assert words[-1] == "site"
    options = [str(doctrees) if word == "build/doctrees" else word for word in words[1:-1]]
    return [sys.executable, *options, "-D", "coloured_sources=phases/*", str(site)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; every warning of the build is an error. Of source files those of the phases have colours."""
    pytest.importorskip("furo", reason="the site needs the extra 'docs': pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("built")
    command = build_command(folder / "site", folder / "doctrees")
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder / "site"


@pytest.fixture(scope="module")
def origin(site: Path) -> Iterator[str]:
    with serving(site) as address:
        yield address


@pytest.fixture(scope="module")
def visits(site: Path, browser: Any, origin: str) -> dict[str, Visit]:
    return crawl(browser, site, origin)


@pytest.fixture(scope="module")
def pages(visits: dict[str, Visit], site: Path, origin: str) -> dict[str, Visit]:
    """Every page of the site: as the browser found it, or read from its HTML."""
    names = {str(path.relative_to(site)) for path in site.rglob("*.html")}
    unseen = {name: (site / name).read_text(encoding="utf-8") for name in names - set(visits)}
    return visits | {name: read(f"{origin}/{name}", html) for name, html in unseen.items()}


@pytest.fixture(scope="module")
def documents(site: Path) -> dict[str, str]:
    """The HTML of the pages that are made from Markdown."""
    paths = [path for top in ("", "docs", "tutorial") for path in (site / top).glob("*.html")]
    return {str(path.relative_to(site)): path.read_text(encoding="utf-8") for path in paths}


def diagrams() -> list[Path]:
    """The diagrams of the pages that ask for the reader's colour scheme."""
    found = [path for folder in ("tutorial", "docs") for path in (ROOT / folder / "images").glob("*.svg")]
    return [path for path in found if "prefers-color-scheme" in path.read_text(encoding="utf-8")]


def teaching_page(site: Path, lesson: Lesson) -> str:
    """The chapter of a phase, or its design page where there is no chapter."""
    pages = (f"tutorial/{lesson.folder.name}.html", f"docs/PHASE_{lesson.number.upper().replace('.', '_')}.html")
    return next(name for name in pages if (site / name).exists())


def without_hidden(html: str) -> str:
    """A page as it is before a reader opens the fold of an exercise."""
    return re.sub(r'(<details class="fold"><summary.*?</summary>).*?(?=</details>)', r"\1", html, flags=re.DOTALL)


def text_of(html: str) -> str:
    return unescape(re.sub(r"<[^>]*>", "", html))


def test_the_browser_has_nothing_to_complain_of(visits: dict[str, Visit]) -> None:
    assert {name: visit.complaints for name, visit in visits.items() if visit.complaints} == {}


def test_every_link_and_anchor_leads_somewhere(pages: dict[str, Visit], site: Path, origin: str) -> None:
    assert broken_links(pages, site, origin) == []


def test_every_page_can_be_reached(visits: dict[str, Visit], pages: dict[str, Visit], origin: str) -> None:
    assert {name for name in pages if not make_of(name)} - set(visits) == {"search.html"}
    reached = {target for name, visit in pages.items() for target in targets(visit, origin) - {name}}
    assert set(pages) - reached - {"index.html"} == {"search.html"}


def test_the_crawl_notices_what_is_broken(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(
        "<a href='other.html#here'>x</a><a href='other.html#nowhere'>x</a><a href='gone.html'>x</a>"
        "<img src='gone.png'><script src='http://203.0.113.1/x.js'></script><script>console.error('oh')</script>"
    )
    (tmp_path / "other.html").write_text("<p id='here'>here<script>throw new Error('thrown')</script>")
    with serving(tmp_path) as origin:
        found = crawl(browser, tmp_path, origin)
        broken = [line.rpartition("/")[2] for line in broken_links(found, tmp_path, origin)]
    told = "\n".join(found["index.html"].complaints)
    assert all(part in told for part in ("console: oh", "404", "http://203.0.113.1/x.js", "picture: "))
    assert [line for line in found["other.html"].complaints if "thrown" in line]
    assert broken == ["other.html#nowhere", "gone.html"]


def test_code_is_copied_without_the_marks_of_wrapped_lines(origin: str, browser: Any) -> None:
    code = (ROOT / "phases/phase_03/engine.py").read_text(encoding="utf-8").splitlines()
    with opened(browser, f"{origin}/source/phases/phase_03/engine.py.html", viewport=PHONE) as page:
        longest = max(code, key=len)
        line = page.locator(f"[id='{code.index(longest) + 1}']")
        assert "↳" in line.evaluate("line => getComputedStyle(line, '::before').content")
        copied = page.locator(".highlight.source pre").evaluate(
            "block => { getSelection().selectAllChildren(block); return getSelection().toString() }"
        )
    assert longest.strip() in copied
    assert "↳" not in copied
    assert len(copied.rstrip().split("\n")) == len(code)


def test_the_site_is_small(site: Path) -> None:
    sizes = {path.relative_to(site): path.stat().st_size for path in site.rglob("*") if path.is_file()}
    assert sum(sizes.values()) < 28_000_000  # colours, of which most are left out here, add 1.5 million
    assert sum(size for path, size in sizes.items() if path.parts[0] == "source") < 10_800_000


def test_the_landing_page_leads_into_the_course_to_the_source_and_to_a_search(origin: str, browser: Any) -> None:
    with opened(browser, origin) as page:
        expect(page.locator(".landing-header strong")).to_have_text("infer")
        page.click("nav >> text=Source")
        expect(page.locator("ul.files")).to_contain_text("pyproject.toml")
        page.go_back()
        page.fill("[role=search] input", "kv cache")
        page.press("[role=search] input", "Enter")
        expect(page.locator("#search-results li a").first).to_have_text("The KV cache")
        page.go_back()
        assert "12 steps" in page.locator("article img:visible").get_attribute("alt")
        page.click("text=Begin")
        expect(page.locator("h1")).to_contain_text("How to use this course")


def test_the_way_through_the_course(site: Path, origin: str, visits: dict[str, Visit]) -> None:
    visit = visits["tutorial/start.html"]
    course = [unquote(link.removeprefix(f"{origin}/").removesuffix("#")) for link in visit.course]
    chapters = [teaching_page(site, lesson) for lesson in lessons() if not lesson.is_side_track]
    assert course == ["tutorial/start.html", *chapters, "tutorial/beyond_one_machine.html"]


@pytest.mark.parametrize("lesson", lessons(), ids=lambda lesson: lesson.number)
def test_a_phase_page_shows_what_changed(lesson: Lesson, site: Path, visits: dict[str, Visit]) -> None:
    visit = visits[teaching_page(site, lesson)]
    if lesson.previous is None:
        assert "The code of this phase" in visit.headings
        assert visit.changes == []
        assert set(lesson.adds) <= set(visit.modules)
        return
    older = find_lesson(lesson.previous)
    assert f"What changed since phase {older.number}" in visit.headings
    lines = [
        line
        for line in diff_lines(older, lesson)
        if not line.startswith(("@@", "--- phases/", "+++ phases/", "--- shared/", "+++ shared/"))
    ]
    assert [line.rstrip("\n") for line in visit.changes] == lines
    assert set(added_modules(older, lesson)) <= set(visit.modules)


def test_a_phase_page_shows_what_was_measured(site: Path, visits: dict[str, Visit]) -> None:
    visit = visits[teaching_page(site, find_lesson("03"))]
    assert any(re.fullmatch(r"contexts-.*\.png", chart) for chart in visit.charts)
    for kind in ("contexts-", "generation-packed-"):
        assert any(link.startswith(f"../benchmarks/reports/{kind}") for link in visit.measured)


def test_quoted_source_leads_to_its_line(site: Path, documents: dict[str, str]) -> None:
    fence = re.compile(r'<div class="[^"]*fence-source[^>]*>(?:\s*<div class="code-block-caption">(.*?)</div>)?')
    for name, html in documents.items():
        for caption in fence.findall(html):
            link = re.search(r'href="([^"#]+)(?:#(\d+))?"', caption)
            path, *definition = re.findall(r'<span class="pre">([^<]+)</span>', caption)
            assert link is not None
            shown = (site / Path(name).parent / link[1]).read_text(encoding="utf-8")
            assert f"<title>{path} - infer</title>" in shown
            line = re.search(rf"<dd id={link[2]}\b[^>]*>(.*)", shown) if definition else None
            assert not definition or (line and definition[0].rpartition(".")[2] in text_of(line[1]))


def test_fences_show_what_stands_in_the_chapter(documents: dict[str, str]) -> None:
    fence = re.compile(r"^( *)```\w+[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
    for chapter in (ROOT / "tutorial").glob("*.md"):
        html = documents[f"tutorial/{chapter.stem}.html"]
        shown = map(text_of, re.findall(r'<div class="highlight"><pre>(.*?)</pre>', without_hidden(html), re.DOTALL))
        blocks = iter([[line.rstrip() for line in text.strip("\n").rstrip().split("\n")] for text in shown])
        for indent, body in fence.findall(chapter.read_text(encoding="utf-8")):
            lines = [line.removeprefix(indent).rstrip() for line in body.strip("\n").rstrip().split("\n")]
            if lines[0].startswith("--- "):  # of whole files: the caption names them, and a hunk is called by its line
                lines = [re.sub(r"^@@ -\d+(,\d+)? \+(\d+)(,\d+)? @@.*", r"line \2", line) for line in lines[2:]]
            if not lines[0].startswith(("+", "-", "line ")):  # what the checker skips is left out for the reader
                lines = ["⋮" if line.strip() == "..." else re.sub(r"(?<!\S)\.{3}(?!\S)", "…", line) for line in lines]
            assert lines in blocks, f"{chapter.name}: {body}"


def test_no_page_shows_a_line_of_an_exercise_before_its_fold_is_opened(site: Path, documents: dict[str, str]) -> None:
    paths = {exercise.path for exercise in exercises()}
    sources = {path: (site / f"source/{path}.html").read_text(encoding="utf-8") for path in sorted(paths)}
    for name, html in (documents | sources).items():
        assert given_away(text_of(without_hidden(html))) == [], name
    for path, html in sources.items():
        assert given_away(text_of(html)), path  # all lines are there
    assert not list((site / "source/tutorial/mistakes").glob("*.toml.html"))  # they hold changes to these lines
    for table in (ROOT / "tutorial/bugs").glob("*.toml"):  # they name the fault, its tests, and hints
        html = (site / f"source/tutorial/bugs/{table.name}.html").read_text(encoding="utf-8")
        for key in ("module = ", "breaks = ", "hints = ", "tests = "):
            assert key in text_of(html)
            assert key not in text_of(without_hidden(html))


def test_a_fold_opens_with_a_click_or_a_key_without_a_script(site: Path, browser: Any) -> None:
    line = "if not any(request.num_pending_tokens for request in decoding):"
    address, blocks = site.as_uri(), ("tutorial/phase_09.html .fence-source", "tutorial/phase_09.html .file-diff")
    for place in (*blocks, "source/shared/scheduling/overlapped.py.html .highlight"):
        page_name, block = place.split()
        with opened(browser, f"{address}/{page_name}", origin=f"{address}/", java_script_enabled=False) as page:
            if block == ".file-diff":
                page.locator(".file-diff > summary", has_text="overlapped.py").click()
            fold = page.locator(f"{block} .fold", has_text="# exercise 09x3")
            hidden, summary = fold.get_by_text(line), fold.locator("summary")
            expect(summary).to_contain_text("…  # exercise 09x3")
            expect(hidden).to_be_hidden()
            summary.click()
            expect(hidden).to_be_visible()
            summary.press("Enter")
            expect(hidden).to_be_hidden()


def test_each_measured_figure_leads_to_its_report(documents: dict[str, str]) -> None:
    for name, shown in documents.items():
        source = ROOT / name.replace(".html", ".md")
        cited = re.findall(r"\{\{report:([^#}]+)\.json#", source.read_text(encoding="utf-8")) if source.exists() else []
        links = re.findall(r'<a class="cited[^>]*href="\.\./benchmarks/reports/([^"]+)\.html" title="measured: ', shown)
        assert links == cited, name
        assert "{{report:" not in shown


@pytest.mark.parametrize("over", ["http", "file"])
def test_search_finds_a_word(over: str, site: Path, origin: str, browser: Any) -> None:
    base = origin if over == "http" else site.as_uri()
    with opened(browser, f"{base}/tutorial/start.html", origin=f"{base}/") as page:
        page.fill(".sidebar-search", "counter-based noise")
        page.press(".sidebar-search", "Enter")
        page.wait_for_selector("#search-results li a")
        expect(page.locator("#search-results h2").first).not_to_contain_text("Searching")
        found = page.eval_on_selector_all("#search-results li a", "all => all.map(link => link.getAttribute('href'))")
    assert any("docs/OVERALL_DESIGN.html" in link or "docs/PHASE_02.html" in link for link in found)


def test_search_for_a_subject_finds_its_chapter_first(origin: str, browser: Any) -> None:
    """Without excerpts, for which Sphinx would fetch each page that it found. The index, megabytes of a script, is
    loaded once."""
    search = """words => {
        DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
        history.replaceState(null, '', `?q=${encodeURIComponent(words)}`);
        document.querySelector('#search-results').replaceChildren();
        Search.performSearch(words);
        return document.querySelector('#search-results li a').getAttribute('href');
    }"""
    with opened(browser, f"{origin}/search.html") as page:
        page.wait_for_function("Search.hasIndex()")
        subjects = [("03", "KV cache"), ("06", "Paged attention"), ("09", "CUDA graph"), ("10", "quantization")]
        for number, words in [*subjects, *((lesson.number, lesson.title) for lesson in lessons())]:
            found = page.evaluate(search, words).partition("?")[0]
            assert found.endswith(f"tutorial/{find_lesson(number).folder.name}.html"), words


def test_a_number_stays_on_the_line_of_its_unit(documents: dict[str, str]) -> None:
    shown = {name: text_of(" ".join(re.findall(r"<td\b.*?</td>", html, re.DOTALL))) for name, html in documents.items()}
    assert sum(len(re.findall(r"\d\N{NO-BREAK SPACE}(?:µs|ms|%|×)", text)) for text in shown.values()) > 100
    parted = {name: re.findall(r"\d (?:µs|ms|%|×|tokens/s|/ \d)[^\n]*", text) for name, text in shown.items()}
    assert {name: found for name, found in parted.items() if found} == {}


def test_dark_mode_switches_and_stays_and_diagrams_follow(documents: dict[str, str], origin: str, browser: Any) -> None:
    pictured = [name for name, html in documents.items() if "only-dark" in html]
    assert bool(pictured) == bool(diagrams())
    name = pictured[0] if pictured else "tutorial/start.html"
    shown = "all => all.filter(image => image.offsetWidth > 0).length > 0"

    def diagrams_shown(page: Any) -> list[bool]:
        return [page.eval_on_selector_all(f"img.only-{scheme}", shown) for scheme in ("light", "dark")]

    with opened(browser, f"{origin}/{name}", viewport={"width": 1400, "height": 900}) as page:
        assert diagrams_shown(page) == [bool(pictured), False]
        for _ in range(3):
            if page.evaluate("document.body.dataset.theme") != "dark":
                page.click(".theme-toggle-content .theme-toggle")
        for _ in range(2):
            assert page.evaluate("document.body.dataset.theme") == "dark"
            assert diagrams_shown(page) == [False, bool(pictured)]
            page.reload()


def test_a_diagram_differs_in_its_colour_scheme_alone(site: Path) -> None:
    folder = site / "_images"
    twins = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*-light.svg")}
    assert set(twins) == {f"{path.parts[-3]}-images-{path.stem}-light.svg" for path in diagrams()}
    for name, light in twins.items():
        dark = (folder / name.replace("-light.svg", "-dark.svg")).read_text(encoding="utf-8")
        assert light != dark
        assert "prefers-color-scheme" not in light + dark
        assert len({re.sub(r"\((?:min|max)-width: 0\)", "", text) for text in (light, dark)}) == 1


@pytest.mark.parametrize(("chapter", "kind"), [("phase_03", "roofline"), ("phase_11", "guesses")])
def test_instruments_have_contrast(chapter: str, kind: str, site: Path, browser: Any) -> None:
    within = f"[data-instrument={kind}]"
    with opened(browser, (site / f"tutorial/{chapter}.html").as_uri(), origin="file:") as tab:
        tab.locator(f"{within} summary").click()
        for scheme in ("light", "dark"):
            tab.emulate_media(color_scheme=scheme)
            found = tab.evaluate(CONTRASTS, within)
            assert len(found) > 40
            assert [(round(ratio, 2), text) for ratio, text in found if ratio < 4.5] == [], scheme

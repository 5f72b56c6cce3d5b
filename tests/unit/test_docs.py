"""What README and docs name exists: links and headings, paths, modules, phases, commands and their options.

Numbers that are cited from a report are the report's. The rules are those of the chapters
(``tutorial/checker/references.py``, ``citations.py``), where the same tests run page by page.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from benchmarks.serving.experiments import EXPERIMENTS
from shared.cli import app
from shared.lessons import lessons
from tests import source_map
from tutorial.checker.chapter import read_chapter
from tutorial.checker.citations import check_citations, cited_lines
from tutorial.checker.references import CHECKS, unknown_commands

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# Requests are not people: words that no file of these folders uses.
PEOPLE = re.compile(r"who(ever)|(no|some|any|every)body", re.IGNORECASE)  # in identifiers too
SPOKEN = ("shared", "phases", "benchmarks", "docs", "tests")

# Phrases of the sources that have no honest use: say after it, and name an argument for what it is.
PHRASES = re.compile(r"\bbehind (it|them|each|that|those|which)\b|\*\*about\b|\babout=")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_exists_and_what_it_cites_stands_in_the_report(page: Path) -> None:
    chapter = read_chapter(page)
    found = [problem for check in CHECKS.values() for problem in check(chapter, ROOT)]
    found += unknown_commands(chapter, ROOT, typer.main.get_command(app))
    found += [problem for line in cited_lines(chapter) for problem in check_citations(chapter, line, ROOT)]
    assert not found, "\n".join(f"{page.name}:{problem.line}: {problem.message}" for problem in found)


def test_options_and_metrics_that_stand_beside_vllms_exist() -> None:
    page = (ROOT / "docs/FROM_VLLM.md").read_text(encoding="utf-8")
    serve: Any = typer.main.get_command(app)
    options = {name for option in serve.commands["serve"].params for name in (*option.opts, *option.secondary_opts)}
    rows = [line.split("|")[2] for line in page.splitlines() if line.startswith("| `--")]
    named = set(re.findall(r"--[a-z-]+", "".join(rows)))
    assert named, "no option is named"
    assert named - options == set()
    metrics = set(re.findall(r"`([a-z0-9_]+)`", page.split("## Metrics")[1].split("## What differs")[0]))
    source = (ROOT / "shared/server/metrics.py").read_text(encoding="utf-8")
    assert {name for name in metrics if f'"infer:{name}"' not in source} == set()


def test_files_and_names_that_stand_beside_vllms_exist() -> None:
    """Each name in a row is defined in a file of the row, or in the newest engine."""
    table = (ROOT / "docs/FROM_VLLM.md").read_text(encoding="utf-8").split("## Flags")[0]
    rows = [re.findall(r"`([^`]+)`", line.split("|")[2]) for line in table.splitlines() if line.startswith("| `")]
    assert rows, "no row has a name of vLLM"
    wrong = []
    for names in rows:
        files, folder = [ROOT / "phases/phase_12/engine.py"], ROOT
        for name in (name for name in names if "/" in name or name.endswith(".py")):
            path = ROOT / name if "/" in name else folder / name
            folder = path if path.is_dir() else path.parent
            files += sorted(path.rglob("*.py")) if path.is_dir() else [path]
        wrong += [str(path) for path in files if not path.is_file()]
        source = "\n".join(path.read_text(encoding="utf-8") for path in files if path.is_file())
        parts = [part for name in names if not ("/" in name or name.endswith(".py")) for part in name.split(".")]
        wrong += [part for part in parts if not re.search(rf"^\s*(class|def) {part}\b", source, re.MULTILINE)]
    assert not wrong


def test_the_map_lists_the_modules_as_they_are() -> None:
    assert source_map.PAGE.read_text(encoding="utf-8") == source_map.page(), "run make map"


def lines_with(words: re.Pattern[str], folder: str, suffixes: tuple[str, ...]) -> list[str]:
    """The lines of a folder's files that hold one of the words."""
    files = [path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in suffixes]
    assert files, f"{folder} has no files"
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if words.search(line)
    ]


@pytest.mark.parametrize("folder", SPOKEN)
def test_requests_are_not_spoken_of_as_people(folder: str) -> None:
    found = lines_with(PEOPLE, folder, (".py", ".md"))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("folder", ["shared", "phases", "benchmarks"])
def test_sources_say_after_and_name_their_arguments(folder: str) -> None:
    found = lines_with(PHRASES, folder, (".py",))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", ["EXPERIMENTS", "PERFORMANCE"])
def test_no_cell_of_a_table_is_longer_than_thirty_words(name: str) -> None:
    page = re.sub(r"<!--.*?-->", "", (ROOT / f"docs/{name}.md").read_text(encoding="utf-8"))
    rows = [(number, line) for number, line in enumerate(page.splitlines(), start=1) if line.startswith("|")]
    assert rows, f"{name}.md has no table"
    cells = [(number, cell.split()) for number, row in rows for cell in re.split(r"(?<!\\)\|", row)]
    long = [
        f"{name}.md:{number}: {len(words)} words: {' '.join(words[:8])} …" for number, words in cells if len(words) > 30
    ]
    assert not long, "move details to a note below the table:\n" + "\n".join(long)


def test_experiments_that_pages_and_lessons_name_exist() -> None:
    pages = [*PAGES, *(ROOT / "tutorial").glob("*.md"), *(ROOT / "phases").glob("*/lesson.toml")]
    named = {name for page in pages for name in re.findall(r"--experiment ([a-z][a-z-]*)", page.read_text("utf-8"))}
    assert {"prefixes", "long-prompts"} <= named <= {experiment.name for experiment in EXPERIMENTS}


def test_the_readme_shows_exactly_the_phases_that_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(\w+(?:\.\d)?)\]\(docs/PHASE_(\w+)\.md\) \| (.+?) \| (.+?) \|$", readme, re.MULTILINE)
    assert [(number, title, question) for number, _, title, question in rows] == [
        (lesson.number, lesson.title, lesson.question) for lesson in lessons()
    ]
    assert [page for _, page, _, _ in rows] == [number.upper().replace(".", "_") for number, _, _, _ in rows]

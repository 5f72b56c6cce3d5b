"""The checker's parts against their definitions: quoted source, phase diffs, cited numbers, references, paths."""

import json
from decimal import Decimal
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from shared.cli import app
from shared.errors import ConfigError
from tutorial.checker.chapter import parse
from tutorial.checker.citations import agrees, check_citations, cited_lines, evaluate, rounded_like
from tutorial.checker.folds import unfolded
from tutorial.checker.quotes import phase_diff, quoted_source
from tutorial.checker.references import COMMAND, command_error, dead_links, looks_like_a_path, resolves
from tutorial.checker.surroundings import Surroundings

ROOT = Path(__file__).parents[2]
SOURCE = '''"""A module."""

import functools

TABLE = {
    "a": 1,  # with a comment
}
size: int = 3


@functools.cache
def cached(n: int) -> str:
    """é: a docstring

    of three lines."""

    return "# hint: this is no hint"


class Box:
    """A class."""

    limit = 2

    async def open(self) -> None:
        """All there is."""

    def fill(self) -> int:
        "short"; x = 1

        # exercise 03x1: add
        # hint: one and one
        # hint: in fp32
        # what stays
        y = x + 1
        # end exercise
        return y
'''


@pytest.fixture
def module(tmp_path: Path) -> Path:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/box.py").write_text(SOURCE)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "with_docstrings", "expected"),
    [
        ("TABLE", True, 'TABLE = {\n    "a": 1,  # with a comment\n}'),
        ("size", True, "size: int = 3"),
        ("Box.limit", True, "limit = 2"),
        ("cached", False, '@functools.cache\ndef cached(n: int) -> str:\n    return "# hint: this is no hint"'),
        ("Box.open", True, 'async def open(self) -> None:\n    """All there is."""'),
        ("Box.open", False, 'async def open(self) -> None:\n    """All there is."""'),
        (
            "Box.fill",
            False,
            'def fill(self) -> int:\n    "short"; x = 1\n\n    …  # exercise 03x1\n    return y',
        ),
    ],
)
def test_a_name_is_quoted_with_its_exercises_folded(
    name: str, with_docstrings: bool, expected: str, module: Path
) -> None:
    quoted = quoted_source(module, f"shared/box.py#{name}", with_docstrings=with_docstrings)
    assert "\n".join(quoted) == expected


def test_what_is_no_fold_hides_nothing_and_a_fold_names_an_exercise_that_exists() -> None:
    assert [unfolded(line) for line in ("... # exercise 01ax2", "x = 1  # exercise 01ax2", "…", "")] == [None] * 4
    with pytest.raises(ConfigError, match="no exercise '01ax99'"):
        unfolded("…  # exercise 01ax99")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("shared/none.py#x", "no source 'shared/none.py'"),
        ("../secret.py", "no source '../secret.py'"),
        ("shared", "no source 'shared'"),
        ("shared/box.py#Box.close", "no 'Box.close'; at its top level it has TABLE, size, cached, Box"),
        ("shared/box.py#cached.x", "no 'cached.x'"),
    ],
)
def test_what_cannot_be_quoted_is_said(target: str, message: str, module: Path) -> None:
    (module.parent / "secret.py").write_text("x = 1\n")
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        quoted_source(module, target)


@pytest.mark.parametrize(
    ("phases", "target", "message"),
    [
        ("03..02", None, "does not come after"),
        ("02", None, "cannot be read"),
        ("02..03", "Engine.run", r"has a method Engine\.run"),
        ("02..03", "Engine.generate", "no diff"),
        ("02..03", "Engine", "write a class and its method"),
        ("06..07", "PreemptiveScheduler.schedule", r"has a method PreemptiveScheduler\.schedule"),
    ],
)
def test_a_diff_that_cannot_be_shown_is_said(phases: str, target: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        phase_diff(phases, target)


@given(st.decimals(-(10**9), 10**9, allow_nan=False, places=6), st.integers(0, 5), st.booleans(), st.booleans())
def test_a_rounded_number_agrees_and_the_next_one_does_not(
    value: Decimal, digits: int, commas: bool, has_typographic_minus: bool
) -> None:
    like = f"{'1,234' if commas else '1234'}{'.' + '5' * digits if digits else ''}"
    shown = rounded_like(f"−{like}" if has_typographic_minus else like, value)
    assert agrees(shown, value)
    assert rounded_like(shown, value) == shown
    step = Decimal(1).scaleb(-digits)
    assert not agrees(shown, value + step * Decimal("1.01"))
    assert not agrees(shown, value - step * Decimal("1.01"))
    if not has_typographic_minus:
        assert abs(Decimal(shown.replace(",", "")) - value) <= step / 2


@pytest.fixture
def reports(tmp_path: Path) -> Path:
    folder = tmp_path / "benchmarks/reports"
    folder.mkdir(parents=True)
    (folder / "a.json").write_text(
        json.dumps({"x": {"03.1": 12.5, "12 free": 8}, "y": [4, 0], "name": "n", "yes": True})
    )
    (folder / "b-2.5ghz.json").write_text(json.dumps({"x": 3}))
    return folder


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("a.json#x.03.1", "12.5"),
        ("a.json#x.03.1 / #y.0", "3.125"),
        ("a.json#y.0 * 100 / b-2.5ghz.json#x * 3", "400"),
        ("100 * a.json#y.0", "400"),
        ("a.json#x.12 free / #y.0", "2"),
    ],
)
def test_sources_are_values_products_and_ratios(source: str, value: str, reports: Path) -> None:
    assert evaluate(source, reports) == pytest.approx(Decimal(value))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a.json", "neither"),
        ("#y.0", "names no report"),
        ("a.json#y.0 /", "cannot be read"),
        ("a.json#y.0 - #y.1", "neither"),
        ("a.json#y.0/#y.1", "has no key|is a list"),
        ("a.json#y.0 / #y.1", "divides by #y.1, which is 0"),
        ("a.json#name", "is 'n', no number"),
        ("a.json#yes", "is True, no number"),
        ("c.json#y", "cannot be read"),
    ],
)
def test_a_source_that_cannot_be_read_is_said(source: str, message: str, reports: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        evaluate(source, reports)


def test_citations_in_tables_are_found_and_code_is_left_alone(reports: Path) -> None:
    page = (
        "| 12.5<!-- {{report:a.json#x.03.1}} --> | 4.0 ×<!-- {{report:a.json#y.0}} --> | 7 |\n"
        "`1<!-- {{report:a.json#y.0}} -->` shows how\n\n"
        "```text\n1<!-- {{report:a.json#y.0}} -->\n```\n"
        "12<!-- {{report:a.json#x.03.1}} --> or 13<!-- {{report:a.json#x.03.1}} -->, "
        "not 14<!-- {{report:a.json#x.03.1}} -->"
    )
    chapter = parse(page)
    assert cited_lines(chapter) == [1, 7]
    assert check_citations(chapter, 1, reports.parents[1]) == []
    (problem,) = check_citations(chapter, 7, reports.parents[1])
    assert "14 is shown" in problem.message
    assert problem.edit is not None
    assert problem.edit.lines[0].startswith("12<!--")
    assert "not 13<!--" in problem.edit.lines[0]


@pytest.mark.parametrize(
    "text",
    [
        "about<!-- {{report:a.json#y.0}} -->",
        "4 <!-- {{report:a.json#y.0}} -->",
        "4<!--{{report:a.json#y.0}}-->",
        "4<!-- {{ report:a.json#y.0 }} -->",
        "4<!-- {{report a.json#y.0}} -->",
        "v1.4<!-- {{report:a.json#y.0}} -->",
        "4<!-- {{report:}} -->",
    ],
)
def test_a_malformed_citation_is_refused(text: str, reports: Path) -> None:
    chapter = parse(f"{text} and 4<!-- {{{{report:a.json#y.0}}}} -->")
    assert cited_lines(chapter) == [1]
    (problem,) = check_citations(chapter, 1, reports.parents[1])
    assert problem.edit is None


def test_references_can_fail() -> None:
    assert resolves("shared.cache.view.contiguous.ContiguousCache.reserve", ROOT)
    assert resolves("shared.engine.config.EngineConfig.model", ROOT)
    assert resolves("shared.ops.attention.ATTENTION_BACKENDS", ROOT)
    assert not resolves("shared.cache.view.contiguous.ContiguousCache.append", ROOT)
    assert not resolves("shared.cache.teleported", ROOT)
    assert looks_like_a_path("shared/cache/teleported.py")
    assert looks_like_a_path("workspace/shared/cache/view/contiguous.py")
    assert not looks_like_a_path("text/plain")


def test_links_of_every_form_are_followed(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# A *fine* title, 2\n\n```text\n# no heading\n```\n")
    page = (
        '[a](there.md#a-fine-title-2 "title") ![b](no.svg) <img src="no.png"> [c](there.md#no-heading) [d](https://x)'
    )
    chapter = parse(page + "\n[e](../x.md)\n    [f](code.md)\n", tmp_path / "page.md")
    found = [(problem.line, problem.message.split()[2]) for problem in dead_links(chapter, tmp_path)]
    assert found == [(1, "no.svg"), (1, "no.png"), (1, "there.md#no-heading"), (2, "../x.md")]


def test_commands_are_found_and_read() -> None:
    page = "`infer chat --fast`, $ infer no\n$ infer diff 1 2  # why\n    infer phases\n$ INFER_X=1 Y= infer chat\n"
    found = [command for line in page.splitlines() for command in COMMAND.findall(line)]
    assert found == ["chat --fast", "diff 1 2  ", "phases", "chat"]
    good = ["diff 02 03 --all | less -r", "generate --prompt 'a -z --zero' --max-tokens=3", "phases sync forward", ""]
    good += ["model pull|list|make", "generate --prompt 'open", "phases | cut -c 1-74"]
    infer = typer.main.get_command(app)
    assert [command_error(line, infer) for line in good] == [None] * 7
    assert command_error("model push", infer) == "there is no command `infer model push`"
    assert command_error("dance", infer) == "there is no command `infer dance`"
    assert "uses --fast, which" in str(command_error("chat --fast", infer))


def test_paths_of_the_machine_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "ada/checkout"
    root.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "ada"))
    monkeypatch.delenv("INFER_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    surroundings = Surroundings(root)
    try:
        text = f"{root}/a.py {tmp_path}/ada/.cache/infer/models {tmp_path}/ada/x {tmp_path}/adam {root}-2"
        outside = surroundings.portable(f"{tmp_path}/adam")
        assert surroundings.portable(text) == f"~/infer/a.py ~/.cache/infer/models ~/x {outside} ~/checkout-2"
        assert surroundings.portable(f"{surroundings.home}/workspace/b {surroundings.home}/c") == "workspace/b ~/c"
        assert surroundings.environment()["INFER_CACHE"] == f"{tmp_path}/ada/.cache/infer"
    finally:
        surroundings.close()
    assert not surroundings.home.exists()

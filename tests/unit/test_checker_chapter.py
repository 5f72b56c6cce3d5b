"""The parser of chapters: what it finds, where, and what it refuses."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tutorial.checker.chapter import Edit, apply, page_lines, parse

KINDS = {
    "python run": "run",
    "python run demo": "run",
    "python source=shared/a.py#B.c": "source",
    "python source=shared/a.py nodoc": "source",
    "diff phases=02..03": "diff",
    "diff target=Engine.f phases=02..03": "diff",
    "console": "console",
    "console norun": "console",
    "text": "plain",
    "toml": "plain",
}
WORDS = st.text(st.sampled_from("ab $.`~>#é\u2028\x0c"), max_size=12)
PROSE = WORDS.filter(lambda line: not line.lstrip(" >").startswith(("```", "~~~")))


@st.composite
def pages(draw: st.DrawFn) -> tuple[list[str], list[tuple[str, int, list[str]]]]:
    """A page's lines, and of each of its fences the info string, the line it opens on, and its body."""
    lines: list[str] = []
    fences: list[tuple[str, int, list[str]]] = []
    for info in draw(st.lists(st.none() | st.sampled_from(sorted(KINDS)), max_size=6)):
        if info is None:
            lines += draw(st.lists(PROSE, max_size=4))
            continue
        indent, ticks = draw(st.sampled_from(["", "  ", "    "])), draw(st.sampled_from(["```", "`````", "~~~"]))
        body = [line for line in draw(st.lists(WORDS, max_size=4)) if not line.strip().startswith(ticks)]
        fences.append((info, len(lines) + 1, body))
        lines += [f"{indent}{ticks}{info}", *(indent + line for line in body), indent + ticks]
    return lines, fences


@given(pages(), st.sampled_from(["\n", "\r\n"]))
@example((["\x0c```", ">\x0c```"], []), "\n")  # a form feed indents nothing
def test_every_fence_is_found_with_its_line_and_body(page: tuple[list[str], list], end: str) -> None:
    lines, expected = page
    chapter = parse(end.join(lines))
    assert [(KINDS[info], line, tuple(body)) for info, line, body in expected] == [
        (fence.kind, fence.line, fence.body) for fence in chapter.fences
    ]
    assert not chapter.problems
    assert all(lines[fence.last - 1].strip() == fence.ticks for fence in chapter.fences)


@given(pages(), st.sampled_from(["\n", "\r\n"]))
def test_an_edit_changes_its_fence_and_not_a_byte_besides(page: tuple[list[str], list], end: str) -> None:
    lines, _ = page
    text = end.join(lines)
    before = parse(text)
    after = parse(apply(text, [fence.replaced(["new", "", "lines"]) for fence in before.fences]))
    assert [fence.body for fence in after.fences] == [("new", "", "lines")] * len(before.fences)
    assert [(fence.kind, fence.indent, fence.ticks) for fence in after.fences] == [
        (fence.kind, fence.indent, fence.ticks) for fence in before.fences
    ]
    assert outside(after.text) == outside(text)


def outside(text: str) -> list[str]:
    """The lines of a page that no fence's body holds, with their ends."""
    inside = {line for fence in parse(text).fences for line in range(fence.line + 1, fence.last)}
    return [line for number, line in enumerate(text.split("\n"), start=1) if number not in inside]


@given(st.text(st.sampled_from("`~> \n\r#ax=.")))
def test_any_text_can_be_parsed_and_stays_as_it_is(text: str) -> None:
    chapter = parse(text)
    assert apply(text, []) == text
    assert len(chapter.prose) == len(page_lines(text))
    ends = [0, *(fence.last for fence in chapter.fences)]
    assert all(fence.line > end for fence, end in zip(chapter.fences, ends, strict=False))
    wrong = {fence.line for fence in chapter.fences if fence.kind == "wrong"}
    assert wrong <= {problem.line for problem in chapter.problems}


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ("", "a fence needs a language"),
        ("python", "needs `run` or `source`"),
        ("python run source=a.py", "only one of them"),
        ("diff", "needs `phases`"),
        ("python run fast", "no attribute `fast`"),
        ("python run nodoc", "no attribute `nodoc`"),
        ("python run=1", "takes no value"),
        ("python source=", "needs a value"),
        ("python run demo demo", "stands twice"),
        ("console demo norun", "leave out `demo` or `norun`"),
        ("text run", "no attribute `run`"),
    ],
)
def test_a_fence_that_is_not_known_is_refused_on_its_line(info: str, message: str) -> None:
    (problem,) = parse(f"prose\n\n```{info}\nx\n```\n").problems
    assert problem.line == 3
    assert message in problem.message


@pytest.mark.parametrize(
    ("page", "line", "message"),
    [
        ("a\n\n```text\nb\n", 3, "never closed"),
        ("> ```text\n> b\n> ```\n", 1, "block quote"),
        ("```output\n1\n```\n", 1, "directly after"),
        ("```python run\n```\nBut first:\n```output\n1\n```\n", 4, "directly after"),
        ("```console\n$ a\n```\n```output\n1\n```\n", 4, "directly after"),
    ],
)
def test_a_fence_in_the_wrong_place_is_refused_on_its_line(page: str, line: int, message: str) -> None:
    problem = parse(page).problems[0]
    assert problem.line == line
    assert message in problem.message


def test_edits_are_made_wherever_they_stand() -> None:
    edits = [Edit(1, 1, ("A", "A")), Edit(3, 2, ("between",)), Edit(4, 4, ())]
    assert apply("a\nb\nc\nd\n", edits) == "A\nA\nb\nbetween\nc\n"
    assert apply("a\r\nb\r\nc\r\nd", [Edit(2, 3, ("x",))]) == "a\r\nx\r\nd"

"""Whole pages in a small repository: each way of going stale fails, and ``--fix`` puts right what it can."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tutorial.checker import collector, runs, sessions

pytest_plugins = ["pytester"]

CONFTEST = """
import typer

from shared.cli import app
from tutorial.checker.collector import pytest_collect_file, pytest_terminal_summary
from tutorial.checker.references import INFER

def pytest_addoption(parser):
    parser.addoption("--fix", action="store_true")

def pytest_configure(config):
    config.stash[INFER] = lambda: typer.main.get_command(app)
"""
NOT_NEEDED = ("cacheprovider", "hypothesispytest", "benchmark", "anyio", "timeout", "schemathesis", "xdist")
PLAIN = ["--assert=plain", *(f"-pno:{plugin}" for plugin in NOT_NEEDED)]
SOURCE = '''"""A module."""

LIMIT = 3


class Cache:
    """What is kept."""

    def reserve(self, n: int) -> bool:
        """Whether there is room."""
        # exercise 03x1: compare
        # hint: with the limit
        return n <= LIMIT
        # end exercise
'''
REPORT = {"results": {"02": {"speed": 5.283, "tokens": 1144}, "03": {"speed": 18.28, "title": "The KV cache"}}}
GOOD = """# A page

See [the module](shared/cache.py), `shared/cache.py`, `shared.cache.Cache.reserve` and `make demo`.

```python run
numbers = [1, 2]
print("sum", sum(numbers))
```

```output
sum 3
```

1. In a list:

   ```python run
   for n in numbers:
       print(n, "took 0.5 s")
   ```
   ```output
   1 took 7.25 s
   2 took 0.5 s
   ...
   ```

```python source=shared/cache.py#Cache.reserve
def reserve(self, n: int) -> bool:
    \"\"\"Whether there is room.\"\"\"
    …  # exercise 03x1
```

```python source=shared/cache.py#Cache.reserve nodoc
def reserve(self, n: int) -> bool:
    …  # exercise 03x1
```

```diff phases=02..03 target=Engine.prefill
 def prefill(self, request: Request) -> torch.Tensor:
-    \"\"\"Run the prompt; logits ``[1, V]`` of the next token.\"\"\"
+    \"\"\"Run the prompt into an empty cache; logits ``[1, V]`` of the next token.\"\"\"
+    self.cache.release()
     return self.forward(request)
```

```console
$ echo one; echo two >&2
one
two
$ printf 'a\\nb\\n' \\
> | tail -1; exit 3
b
exit code 3
```

```console norun
$ infer diff 02 03 --all
```

Phase 3 makes **18.3**<!-- {{report:r.json#results.03.speed}} --> tokens a second instead of
5.28<!-- {{report:r.json#results.02.speed}} -->, 3.5×<!-- {{report:r.json#results.03.speed / #results.02.speed}} -->
as many, and 1,144<!-- {{report:r.json#results.02.tokens}} --> became fewer.

```text
numbers that are not checked: 99
```
"""
assert GOOD.count("\\\n") == 1


@pytest.fixture
def repository(pytester: pytest.Pytester) -> Path:
    """A repository with one module, one report and one target; pages go to its root."""
    root = pytester.path
    (root / "shared").mkdir()
    (root / "shared/cache.py").write_text(SOURCE)
    (root / "benchmarks/reports").mkdir(parents=True)
    (root / "benchmarks/reports/r.json").write_text(json.dumps(REPORT))
    (root / "Makefile").write_text("demo:\n\techo\n")
    pytester.makeconftest(CONFTEST)
    pytester.makeini("[pytest]\nmarkers =\n  demo: needs the demo model\n")
    return root


@pytest.fixture
def check(repository: Path, pytester: pytest.Pytester):
    """Write a page and check it: the result, and what was printed about it."""

    def run(page: str | None, *options: str) -> tuple[pytest.RunResult, str]:
        if page is not None:
            (repository / "page.md").write_text(page, newline="")
        chosen = options if any(option.startswith("page.md") for option in options) else ("page.md", *options)
        result = pytester.runpytest_inprocess(*PLAIN, "-rs", *chosen)
        return result, result.stdout.str()

    return run


RECORDING = {
    "format": 1,
    "functions": [{"name": "Engine.step", "path": "engine.py", "first": 1, "lines": ["def step(self):", "    run()"]}],
    "lines": [[0, 0, 0, ""], [0, 1, 0, ""]],
    "events": [[0, 1], [1, 1], [0, 1]],
    "steps": [{"first": 0, "ms": 1}, {"first": 2, "ms": 1}],
    "questions": [{"name": "predict", "step": 0, "line": "run", "ask": "?", "reveal": "!"}],
    "state": {},
}


MOMENTS = {
    "phase_07.json": "",
    "phase_07.json#step=0&line=run": "",
    "phase_07_by_06_1.json#step=1&line=step": "",
    "phase_07.json#ask=predict": "",
    "phase_07.json#step=1&line=run": "has no line 'run' in step 1",
    "phase_07.json#step=2": "has no line '' in step 2",
    "phase_07_by_06_1.json#ask=guess": "asks no question 'guess'",
    "phase_07.json#stop=1": "an address has no stop",
    "phase_08.json#step=0": "there is no phase_08.json",
}


def test_a_link_to_a_recording_names_a_moment(repository: Path, check: Any) -> None:
    (repository / "recordings").mkdir()
    for each in ("phase_07", "phase_07_by_06_1"):
        (repository / f"recordings/{each}.json").write_text(json.dumps(RECORDING))
    page = "# Page\n" + "".join(f"\n[Words on\ntwo lines](recordings/{address})\n" for address in MOMENTS)
    _, printed = check(page, "-k", "links")
    for address, told in MOMENTS.items():
        wrong = f"page.md:{line_of(page, f'recordings/{address})')}: "
        assert (wrong in printed) == bool(told), address
        assert told in printed


def line_of(page: str, text: str) -> int:
    return page[: page.index(text)].count("\n") + 1


def test_a_good_page_passes_and_each_test_is_named_by_kind_and_line(check) -> None:
    result, told = check(GOOD, "-v")
    result.assert_outcomes(passed=14)
    names = [line.split()[0] for line in told.splitlines() if "PASSED" in line]
    tests = ["run:5", "run:16", "source:26", "source:32", "diff:37", "console:45", "console:55"]
    tests += ["report:59", "report:60", "report:61", "links", "paths", "names", "commands"]
    assert names == [f"page.md::{test}" for test in tests]


FIXABLE = {
    "output": ("sum 3\n", "sum 4\n", "the output shown is not what the code above prints"),
    "output in a list": ("   2 took 0.5 s\n", "   3 took 0.5 s\n", "the output shown"),
    "source": (
        "    …  # exercise 03x1\n```\n\n```python source",
        "    return n <= LIMIT\n```\n\n```python source",
        "code",
    ),
    "source without docstring": ("reserve nodoc\n", "reserve nodoc\n# an old comment\n", "the code is not that of"),
    "diff": ("+    self.cache.release()\n", "", "the diff is not that of phases 02..03"),
    "console": ("one\ntwo\n", "one\n", "not what was printed by: echo one"),
    "number": ("**18.3**", "**18.2**", "18.2 is shown, and r.json#results.03.speed is 18.28, which makes 18.3"),
    "ratio": (" 3.5×", " 3.4×", "3.4 is shown"),
    "thousands": ("1,144<", "1,145<", "which makes 1,144"),
}


def test_what_is_stale_fails_on_its_own_and_nothing_is_written(check, repository: Path) -> None:
    page, messages = GOOD, []
    for old, new, message in FIXABLE.values():
        assert page.count(old) == 1
        page = page.replace(old, new)
        messages.append(message)
    result, told = check(page)
    result.assert_outcomes(failed=9, passed=5)
    assert [message for message in messages if message not in told] == []
    assert told.count("To write what was found into the page: pytest page.md --fix") == 9
    assert "Traceback" not in told
    assert (repository / "page.md").read_text() == page


def test_fix_writes_everything_at_once_and_a_second_time_nothing(check, repository: Path) -> None:
    page = "Prose \t\x0c with  odd\u2028 spaces  \n" + GOOD
    stale = page
    for old, new, _ in FIXABLE.values():
        assert stale.count(old) == 1
        stale = stale.replace(old, new)
    for end in ("\n", "\r\n"):
        stale_bytes = stale.replace("\n", end).encode()
        (repository / "page.md").write_bytes(stale_bytes)
        result, told = check(None, "--fix")
        result.assert_outcomes(passed=14)
        fixed = (repository / "page.md").read_bytes()
        assert fixed == page.replace("\n", end).encode()
        result, told = check(None, "--fix")
        result.assert_outcomes(passed=14)
        assert "fixed" not in told
        assert (repository / "page.md").read_bytes() == fixed


# What is said of each kind of fence or reference; its other faults are told apart in the tests of the parts. The
# faults of one page are on separate lines.
BROKEN = [
    [
        ("```text", "```ruby", "```ruby", "there is no fence `ruby`"),
        ("numbers = [1, 2]", "numbers = [1, 2] + 1", "```python run", "TypeError"),
        ("cache.py#Cache.reserve\n", "cache.py#Cache.grow\n", "```python source", "no 'Cache.grow'"),
        ("phases=02..03", "phases=02..77", "```diff", "no phase '77'"),
        ("b\nexit code 3\n", "b\n", "$ printf", "ended with code 3, and the page says exit code 0"),
        ("#results.02.tokens}}", "#results.02.nothing}}", "as many", "no key 'results.02.nothing'"),
        ("(shared/cache.py)", "(shared/cash.py)", "See", "leads to nothing"),
        ("`shared/cache.py`", "`shared/cash.py`", "See", "`shared/cash.py` does not exist"),
        ("`shared.cache.Cache.reserve`", "`shared.cache.Cache.grow`", "See", "no module and no attribute"),
        ("`make demo`", "`make tea`", "See", "no target `make tea`"),
        ("--all", "--every", "$ infer", "uses --every"),
    ],
    [
        ("```console\n$ echo", "```console\none\n$ echo", "one\n$ echo", "begins with a command"),
        ("1,144<!--", "1,144 tokens <!--", "as many", "citation that cannot be read"),
        ("02 03 --all", "02 03; pytest tests/none.py::x; python -m shared.none", "$ infer", "`tests/none.py` does"),
        ("-m shared.none", "-m shared.none", "$ infer", "`shared.none` is no"),
    ],
]


@pytest.mark.parametrize("faults", BROKEN, ids=["first", "second"])
def test_what_only_the_author_can_put_right_fails_on_its_line_and_is_not_fixed(
    faults: list[tuple[str, str, str, str]], check, repository: Path
) -> None:
    page = GOOD
    for old, new, _, _ in faults:
        assert page.count(old) == 1
        page = page.replace(old, new)
    _, told = check(page, "--fix")
    for _, _, place, message in faults:
        assert f"page.md:{line_of(page, place)}: " in told
        assert message in told
    assert (repository / "page.md").read_text() == page


def test_a_fence_asked_for_alone_runs_those_before_it_once(check) -> None:
    page = "".join(f"```python run\n{code}\n```\n" for code in ("print(1)\na = []", "a.append(1)", "print(a)"))
    page += "```output\n[1]\n```\n```python run\nraise SystemExit\n```\n"
    result, _ = check(page, "page.md::run:8")
    result.assert_outcomes(passed=1)
    result, _ = check(page)
    result.assert_outcomes(passed=7, failed=1)


def test_what_comes_after_a_failing_fence_names_that_fence(check) -> None:
    _, told = check("```python run\nno_such_name\n```\n```python run\nprint(1)\n```\n", "page.md::run:4")
    assert "page.md:4: the run fence on line 1, which comes before this, raised an exception" in told


def test_a_traceback_has_the_lines_of_the_page(check, repository: Path) -> None:
    _, told = check("# Title\n\n- item\n\n  ```python run\n  def f():\n      return 1 / 0\n  f()\n  ```\n")
    assert f'File "{repository}/page.md", line 7, in f' in told
    assert "return 1 / 0" in told
    assert "worker.py" not in told
    _, told = check("```python run\nx = (\n```\n")
    assert f'File "{repository}/page.md", line 2' in told
    assert "SyntaxError" in told


def test_a_page_runs_offline_on_the_cpu_with_a_home_of_its_own(check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFER_WORKSHOP", "1")
    monkeypatch.setenv("INFER_MODEL", "/nowhere")
    before = dict(os.environ), os.getcwd()
    page = """```python run
import os, socket, subprocess, sys
print(os.environ.get("INFER_WORKSHOP"), os.environ.get("INFER_MODEL"), os.environ["HF_HUB_OFFLINE"])
print(os.getcwd() == os.environ["HOME"], os.listdir())
print(os.getcwd())
server = socket.create_server(("127.0.0.1", 0))
socket.create_connection(server.getsockname()).close()
for reach in (lambda: socket.create_connection(("192.0.2.1", 80)), lambda: socket.getaddrinfo("example.org", 80)):
    try:
        reach()
    except PermissionError as error:
        print(error)
subprocess.run([sys.executable, "-c", "print('from a child')"])
os.environ["LEFT"] = "behind"
os.chdir("/")
open(os.environ["HOME"] + "/note", "w").close()
```
```output
None None 1
True []
~
a chapter's code runs without a network, and this reaches for 192.0.2.1
a chapter's code runs without a network, and this reaches for example.org
from a child
```
```console
$ ls ~; echo $LEFT$INFER_WORKSHOP $COLUMNS $NO_COLOR $INFER_WORKSPACE; pwd; cat
note
100 1 workspace
~/infer
$ cd shared; ls
cache.py
$ pwd
~/infer
```
"""
    result, _ = check(page)
    result.assert_outcomes(passed=6)
    assert (dict(os.environ) | {"PYTEST_CURRENT_TEST": ""}, os.getcwd()) == (
        before[0] | {"PYTEST_CURRENT_TEST": ""},
        before[1],
    )


def test_each_page_has_a_process_and_a_folder_of_its_own(check, repository: Path) -> None:
    (repository / "other.md").write_text("```python run\nimport os\nprint(os.listdir(), 'a' in globals())\n```\n"
                                         "```output\n[] False\n```\n")  # fmt: skip
    result, _ = check("```python run\na = open('a', 'w')\n```\n", "page.md", "other.md")
    result.assert_outcomes(passed=10)


def test_demo_fences_are_skipped_with_the_reason_where_the_model_is_missing(
    check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFER_CACHE", str(tmp_path / "empty"))
    page = "```python run demo\nraise 1\n```\n```output\n1\n```\n```console demo\n$ false\n```\n"
    page += "```python run\nprint(2)\n```\n```output\n2\n```\n"
    result, told = check(page)
    result.assert_outcomes(passed=5, skipped=2)
    assert "the demo model is not fetched; run `infer model pull smollm2-135m` once" in told


def test_a_plain_fence_cannot_need_the_demo_model_by_accident(check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "local_model_folder", lambda name: Path("/somewhere"))
    plain, demo = "```python run\n{}\n```\n", "```python run demo\n{}\n```\n"
    page = plain.format("a = 1") + demo.format("b = a + 1") + plain.format("a = 5") + demo.format("print(a, b)")
    result, _ = check(page + "```output\n5 2\n```\n")
    result.assert_outcomes(passed=8)
    result, told = check(page + plain.format("b"))
    result.assert_outcomes(passed=8, failed=1)
    assert "NameError" in told


def test_what_does_not_end_is_stopped_and_what_ends_is_told(check) -> None:
    page = "```python run\nimport time\ntime.sleep(60)\n```\n"
    with pytest.MonkeyPatch.context() as patch:
        for module in (runs, sessions):
            patch.setattr(module, "TIME_LIMIT", 0.3)
        _, told = check(page + "```console\n$ echo begun; sleep 60\n```\n")
    assert "page.md:1: did not end within 0.3 seconds" in told
    assert "page.md:6: did not end within 0.3 seconds, and the page says" in told
    _, told = check("```python run\nimport os\nos._exit(7)\n```\n")
    assert "page.md:1: ended the interpreter, with exit code 7" in told


def test_an_output_that_would_end_its_fence_is_not_written(check, repository: Path) -> None:
    page = "```python run\nprint('`' * 3)\n```\n```output\n```\n"
    for options in ((), ("--fix",)):
        _, told = check(page, *options)
        assert "open and close it with more backticks" in told
    assert (repository / "page.md").read_text() == page
    check(page.replace("```output\n```", "````output\n````"), "--fix")
    assert (repository / "page.md").read_text().endswith("````output\n```\n````\n")


def test_a_silent_fence_needs_no_output(check) -> None:
    result, told = check("```python run\na = 1\n```\n```output\n1\n```\n")
    result.assert_outcomes(passed=4, failed=1)
    assert "page.md:4: the fence above prints nothing; remove this output fence" in told


def test_a_page_that_is_edited_meanwhile_is_not_written(check, repository: Path) -> None:
    page = f"```python run\nopen({str(repository / 'page.md')!r}, 'a').write('more')\nprint(1)\n```\n```output\n```\n"
    result, told = check(page, "--fix")
    result.assert_outcomes(passed=5, errors=1)
    assert "page.md was edited while it was checked; nothing is written, run this again" in told
    assert (repository / "page.md").read_text() == page + "more"

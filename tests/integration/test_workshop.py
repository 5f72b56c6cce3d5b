"""``infer workshop`` as a learner uses it, and their code inside other commands: real files, and real processes where
more than the command itself counts; other commands run in this one, with a server of checks that all of them share.
Marked slow: `tests/unit/test_workshop.py` has the parts without their processes."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shared.cli import app
from shared.kernels import NO_TRITON
from tests.integration.forked_infer import run_infer
from tests.integration.infer_process import heed_interrupts
from tests.waiting import PATIENCE
from tutorial.workshop.check import CheckServer
from tutorial.workshop.exercises import exercises, find_exercise, reference
from tutorial.workshop.verdicts import Outcome

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
KV_BYTES_GAP = 'raise NotImplementedError("exercise 03x1: what one token costs, in bytes")'
GAP_LINE = reference(find_exercise("03x1"))[1].begin + 2  # the number of the gap's line, from 1
KV_BYTES = reference(find_exercise("03x1"))[1].lines[-1].strip()
needs_triton = pytest.mark.skipif(NO_TRITON is not None, reason=f"{NO_TRITON}")


class Learner:
    """A learner at a terminal, with their own workspace."""

    def __init__(self, workspace: Path, server: CheckServer) -> None:
        self.workspace = workspace
        self.server = server

    def workshop(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """``infer workshop`` in this process."""
        environment = {"INFER_WORKSPACE": str(self.workspace), "NO_COLOR": "1"}
        done = CliRunner().invoke(app, ["workshop", *arguments], env=environment)
        return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)

    def check(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.workshop("check", *arguments)

    def fork(self, code: str, *, is_interpreted: bool = False, **variables: str) -> str:
        """What these lines print in a process that has imported nothing of the project."""
        self.workspace.mkdir(exist_ok=True)
        file = self.workspace / "test_lines.py"
        file.write_text("def test_lines():\n" + textwrap.indent(code, "    "))
        options = ("-s", "--tb=native", "--rootdir", str(self.workspace), "-c", os.devnull, str(file))
        return self.pytest(*options, is_interpreted=is_interpreted, INFER_WORKSHOP="1", **variables)[1]

    def pytest(self, *arguments: str, is_interpreted: bool = False, **variables: str) -> tuple[int, str]:
        """The exit code and the output of pytest in such a process."""
        return self._fork(["-p", "no:cacheprovider", *arguments], variables, is_interpreted)

    def infer(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """``infer`` in such a process."""
        errors = self.workspace / "errors"
        errors.unlink(missing_ok=True)
        code, printed = self._fork([], variables, False, partial(run_infer, str(errors), *arguments))
        return subprocess.CompletedProcess(arguments, code, printed, errors.read_text())

    def _fork(
        self,
        arguments: list[str],
        variables: dict[str, str],
        is_interpreted: bool,
        before: Callable[[], None] | None = None,
    ) -> tuple[int, str]:
        variables |= {"INFER_WORKSPACE": str(self.workspace), "NO_COLOR": "1"}
        with tempfile.TemporaryFile() as printed:
            process = self.server._start(arguments, variables, is_interpreted, printed.fileno(), before)
            code = process.wait(PATIENCE)
            printed.seek(0)
            return code, printed.read().decode()

    @property
    def cache(self) -> Path:
        return self.workspace / "shared/cache/view/contiguous.py"

    def write(self, old: str, new: str, file: Path | None = None) -> None:
        file = file or self.cache
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))


@pytest.fixture
def learner(tmp_path: Path, one_server: CheckServer, session_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Learner:
    """What known mistakes do is kept for all of them, and by `test_mistakes`."""
    monkeypatch.setattr("tutorial.workshop.session.KEPT", str(session_folder / "mistakes"))
    return Learner(tmp_path / "workspace", one_server)


def test_from_start_to_passed(learner: Learner) -> None:
    started = learner.workshop("start", "3", "--only", "3x1")
    assert started.returncode == 0, started.stderr
    assert "workspace/shared/cache/view/contiguous.py" in started.stdout
    assert f"03x1  line {GAP_LINE:>4}" in started.stdout
    assert "infer workshop check 03x1" in started.stdout

    todo = learner.check("03x1")
    assert todo.returncode == 1
    assert "to do" in todo.stdout
    assert "0 of 1 passed" in todo.stdout

    learner.write(KV_BYTES_GAP, KV_BYTES.replace("num_kv_heads", "num_heads"))
    wrong = learner.check()
    assert wrong.returncode == 1
    assert "failed" in wrong.stdout
    assert "kv_bytes of 100 tokens: expected " in wrong.stdout
    assert "test_cache_bytes_equal_the_formula" in wrong.stdout

    learner.write("num_heads", "num_kv_heads")
    right = learner.check("--only", "03x1")
    assert right.returncode == 0, right.stdout + right.stderr
    assert "6 tests, run on kv_bytes of" in right.stdout
    assert "on your lines: INFER_WORKSHOP=1 infer generate --phase 03 " in right.stdout
    assert f"next: 03x2 {find_exercise('03x2').title}" in right.stdout
    assert "start it: infer workshop start 03x2" in right.stdout
    status = learner.workshop("status").stdout
    assert re.search(r"03x1 +passed", status)
    assert re.search(r"03x4 +not started", status)
    assert "04x1" not in status
    assert f"1 of {len(exercises())} passed; --all shows every exercise" in status
    assert all(exercise.number in learner.workshop("status", "--all").stdout for exercise in exercises())

    learner.write("return 2 *", "return 1 + 1 *")
    assert f"0 of {len(exercises())} passed" in learner.workshop("status").stdout, "a check holds for the file it saw"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("return config.num_layerz", f"contiguous.py:{GAP_LINE}"),
        (
            "x = 2\n    return x + )",
            f"contiguous.py:{GAP_LINE + 1}\n{' ':12}return x + )\n{' ':12}           ^\n",
        ),
        ("\0", "null bytes"),
    ],
)
def test_broken_code_is_reported_and_never_passes(learner: Learner, code: str, message: str) -> None:
    learner.workshop("start", "03", "--only", "03x1")
    learner.write(KV_BYTES_GAP, code)
    checked = learner.check()
    assert checked.returncode == 1
    assert message in checked.stdout
    assert "0 of 1 passed" in checked.stdout


def test_what_has_not_changed_is_answered_from_the_record(learner: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = KV_BYTES.replace("num_kv_heads", "num_heads")
    learner.workshop("start", "03")
    learner.write(KV_BYTES_GAP, wrong)
    failed = learner.check("03x1")
    learner.write(wrong, KV_BYTES)
    passed = learner.check("03x1")
    with monkeypatch.context() as patch:
        patch.setattr(CheckServer, "run", lambda *_, **__: pytest.fail("it ran again"))
        gap = f'raise NotImplementedError("{find_exercise("03x2").message}")'
        learner.write(gap, "return (")
        assert "SyntaxError: '(' was never closed" in learner.check("03x2").stdout, "it is not run either"
        learner.write("return (", "self.num_past = 7")
        again = learner.check("03x1")
        assert again.returncode == 0
        assert "; nothing has changed since" in again.stdout, "the lines of 03x2 do not count"
        assert passed.stdout.startswith(again.stdout.partition("; nothing has changed since")[0])
    learner.write("self.num_past = 7", gap)
    learner.workshop("reset", "03x1")
    learner.write(KV_BYTES_GAP, KV_BYTES)
    assert "nothing has changed since" in learner.check("03x1").stdout
    assert f"1 of {len(exercises())} passed" in learner.workshop("status").stdout, "what is answered is noted too"
    learner.write(KV_BYTES, wrong)
    assert learner.check("03x1").stdout == failed.stdout, "a change of its own lines is run"


def test_a_pass_that_needed_the_lines_of_another_exercise_is_not_answered_from_the_record(learner: Learner) -> None:
    learner.workshop("start", "03")
    swaps = {
        "03x3": (
            "new_keys[layer].copy_(k)",
            "new_keys[layer].copy_(v)",
            "new_values[layer].copy_(v)",
            "new_values[layer].copy_(k)",
        ),
        "03x4": ("k, v = self.keys[layer], self.values[layer]", "v, k = self.keys[layer], self.values[layer]"),
    }
    for number, changes in swaps.items():
        exercise = find_exercise(number)
        lines = "\n".join(reference(exercise)[1].lines)
        for right, wrong in zip(changes[::2], changes[1::2], strict=True):
            assert right in lines
            lines = lines.replace(right, wrong)
        learner.write(f'        raise NotImplementedError("{exercise.message}")', lines)

    def outcomes() -> list[str]:
        lines = learner.check("03").stdout.splitlines()
        return [line.split("  ")[1] for line in lines if line.startswith(("03x3", "03x4"))]

    assert outcomes() == ["failed", "passed"], "keys and values are swapped twice"
    for right, wrong in zip(swaps["03x3"][::2], swaps["03x3"][1::2], strict=True):
        learner.write(wrong, right)
    assert outcomes() == ["passed", "failed"]


def test_a_file_with_a_byte_order_mark_is_run_like_any_other(learner: Learner) -> None:
    learner.workshop("start", "03")
    learner.write(KV_BYTES_GAP, KV_BYTES)
    exercise = find_exercise("03x3")
    learner.write(f'raise NotImplementedError("{exercise.message}")', "return q")
    learner.cache.write_text(learner.cache.read_text(), encoding="utf-8-sig")
    checked = learner.check("03").stdout
    assert re.search(r"03x1 +passed", checked), checked
    assert re.search(r"03x3 +failed", checked), checked


LOOPS = {
    "in Python": "while True:\n        try:\n            int('x')\n        except BaseException:\n            pass",
    "in C": "import collections, itertools; collections.deque(itertools.repeat(1), maxlen=0)",
}


@pytest.mark.parametrize("code", LOOPS.values(), ids=LOOPS)
def test_an_endless_loop_is_ended_and_the_line_that_was_running_named(learner: Learner, code: str) -> None:
    """Here after half a second of processor time. What follows in the same check does not run."""
    learner.workshop("start", "03")
    learner.write(KV_BYTES_GAP, code)
    learner.write(f'raise NotImplementedError("{find_exercise("03x3").message}")', "return q")
    wanted = [find_exercise("03x1"), find_exercise("03x3")]
    run = learner.server.run(learner.workspace, wanted, time_factor=0.1)
    late, other = run.verdicts
    assert late.outcome is Outcome.FAILED
    assert late.first_failure is not None
    assert late.first_failure.error.startswith("TimeoutError: did not finish within 0.5 s of processor time")
    path, _, number = (late.where or "").rpartition(":")
    assert path == str(learner.cache)
    assert GAP_LINE <= int(number) <= GAP_LINE + code.count("\n")
    assert other.outcome is Outcome.NOT_RUN
    assert other.reason == f"the check stopped at {late.first_failure.test}, which ran out of time"


def test_a_loop_that_uses_no_processor_time_is_ended_too(learner: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tutorial.workshop.check.SECONDS_PER_TEST", 1.0)
    learner.workshop("start", "03x1")
    learner.write(KV_BYTES_GAP, "import time; time.sleep(600)")
    checked = learner.check("03x1")
    assert "TimeoutError: did not finish within 1 s; correct code needs a tenth of that at most" in checked.stdout
    assert f"contiguous.py:{GAP_LINE}\n            import time; time.sleep(600)\n" in checked.stdout


def test_what_would_take_the_machine_s_memory_is_refused_it_and_the_line_named(learner: Learner) -> None:
    learner.workshop("start", "03x1")
    learner.write(KV_BYTES_GAP, "return len(bytearray(4 << 30))")
    shown = learner.check("03x1").stdout
    assert "MemoryError\n          a check has 3 GiB; correct code needs a quarter of that at most\n" in shown
    assert f"contiguous.py:{GAP_LINE}\n            return len(bytearray(4 << 30))\n" in shown


def test_a_function_that_comes_from_elsewhere_does_not_pass(learner: Learner) -> None:
    learner.workshop("start", "03", "--only", "03x1")
    learner.write(KV_BYTES_GAP, "return 0")
    reference = ROOT / "shared/cache/view/contiguous.py"
    learner.cache.write_text(f"exec(compile(open({str(reference)!r}).read(), {str(reference)!r}, 'exec'))\n")
    checked = learner.check()
    assert checked.returncode == 1
    assert "kv_bytes that ran is not the workspace's" in checked.stdout


def test_the_learner_s_code_runs_inside_the_engine_and_the_reference_where_gaps_are_left(
    learner: Learner, tiny_checkpoints: dict[str, Path]
) -> None:
    learner.workshop("start", "03")
    learner.write(KV_BYTES_GAP, KV_BYTES)
    title = "attend over the cache, in a sliding-window layer over the window alone"
    attend = f'raise NotImplementedError("exercise 03x4: {title}")'
    learner.write(attend, 'raise RuntimeError("this is mine")')
    command = ("generate", "--phase", "03", "--model", str(tiny_checkpoints["llama"]), "--prompt", "ab")
    command += ("--max-tokens", "3")
    failed = learner.infer(*command, INFER_WORKSHOP="1", TERMINAL_WIDTH="300")
    assert failed.returncode == 1
    assert "this is mine" in failed.stderr
    lines = learner.cache.read_text().splitlines()
    number = next(number for number, line in enumerate(lines, 1) if "this is mine" in line)
    assert f"contiguous.py:{number} in attend" in failed.stderr
    learner.write('raise RuntimeError("this is mine")', attend)
    done = learner.infer(*command, INFER_WORKSHOP="1")
    assert done.returncode == 0, done.stderr
    assert "workshop: your code for 03x1; 03x2, 03x3, 03x4 still to do (the reference runs there)" in done.stderr
    assert done.stdout == CliRunner().invoke(app, command).stdout
    learner.write(KV_BYTES, "return (")
    broken = learner.infer(*command, INFER_WORKSHOP="1")
    assert broken.returncode == 2
    assert f"contiguous.py, line {GAP_LINE}" in broken.stderr
    assert "Traceback" not in broken.stderr


def test_the_learner_s_code_runs_in_the_engine_s_process(learner: Learner, tiny_checkpoints: dict[str, Path]) -> None:
    learner.workshop("start", "01a")
    norm = learner.workspace / "shared/ops/rmsnorm.py"
    norm.write_text(
        f"{norm.read_text()}\nimport multiprocessing\n"
        "if multiprocessing.current_process().name == 'engine':\n    raise RuntimeError('this is mine')\n"
    )
    command = [sys.executable, "-m", "phases.phase_04", "serve", str(tiny_checkpoints["llama"]), "--engine-process"]
    environment = {**os.environ, "INFER_WORKSPACE": str(learner.workspace), "INFER_WORKSHOP": "1"}
    command += ["--port", "0"]
    failed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert failed.returncode == 1
    assert "RuntimeError: this is mine" in failed.stderr


def test_under_pytest_a_gap_raises(learner: Learner) -> None:
    learner.workshop("start", "03", "--only", "03x1")
    tests = "phases/phase_03/test_parity.py::test_cache_bytes_equal_the_formula"
    code, printed = learner.pytest("--workshop", "-q", tests)
    assert code == 1
    assert "NotImplementedError: exercise 03x1: what one token costs, in bytes" in printed


def test_where_forks_are_not_supported_each_check_is_a_process_of_its_own(learner: Learner) -> None:
    learner.workshop("start", "02", "--only", "02x5")
    exercise = find_exercise("02x5")
    with CheckServer(forks=False) as server:
        run = server.run(learner.workspace, [exercise], gaps_raise=True)
        assert run.verdicts[0].outcome is Outcome.FAILED
        assert set(run.errors.values()) == {f"NotImplementedError: {exercise.message}"}
        ended = server.run(learner.workspace, [exercise], seconds=0)
        assert ended.verdicts[0].outcome is Outcome.NOT_RUN
        assert ended.verdicts[0].reason == "the run was ended after 0 s"


@needs_triton
def test_a_kernel_is_checked_through_the_interpreter(learner: Learner) -> None:
    started = learner.workshop("start", "03.1", "--only", "3.1x1")
    assert started.returncode == 0, started.stderr
    assert "  03.1x1  line" in started.stdout
    kernel = learner.workspace / "shared/kernels/products/gated.py"
    gap = 'raise NotImplementedError("exercise 03.1x1: both gated activations, GELU without a tanh")'
    sigmoid = "tl.sigmoid({}gate{})"
    code = 'return gate * up * ({} if ACTIVATION == "silu" else {})'.format(
        sigmoid.format("", ""), sigmoid.format("1.5957691216057308 * ", " * (1.0 + 0.044715 * gate * gate)")
    )
    learner.write(gap, code.replace("tl.sigmoid", "tl.sigmod"), kernel)
    wrong = learner.check("03.1", "--only", "03.1x1")
    assert wrong.returncode == 1
    assert "AttributeError: module 'triton.language' has no attribute 'sigmod'" in wrong.stdout
    number = next(number for number, line in enumerate(kernel.read_text().splitlines(), 1) if "sigmod" in line)
    assert f"shared/kernels/products/gated.py:{number}" in wrong.stdout
    learner.write("tl.sigmod", "tl.sigmoid", kernel)
    right = learner.check()
    assert right.returncode == 0, right.stdout + right.stderr
    assert "24 tests, run on gated_activation of" in right.stdout


@needs_triton
def test_the_interpreter_runs_the_text_of_a_kernel_that_the_workspace_gives(learner: Learner) -> None:
    """The interpreter reads a kernel's source again: with its gaps filled it has to find the lines that ran."""
    learner.workshop("start", "03.1")
    code = (
        "import shared.cli, torch; from shared.kernels.products import gated; from shared.ops.gated import swiglu\n"
        "gate, up = torch.randn(2, 33), torch.randn(2, 33)\n"
        "print(torch.allclose(gated.swiglu(gate, up), swiglu(gate, up), atol=1e-6))\n"
        "print(gated.gated_kernel.fn.__code__.co_filename)\n"
    )
    filled = learner.fork(code, is_interpreted=True)
    assert f"True\n{learner.workspace / 'shared/kernels/products/gated.py'}\n" in filled
    raising = learner.fork(code, is_interpreted=True, INFER_WORKSHOP_GAPS="raise")
    assert "NotImplementedError: exercise 03.1x1: both gated activations, GELU without a tanh" in raising


def test_solution_asks_first_and_shows_the_difference(learner: Learner) -> None:
    learner.workshop("start", "03", "--only", "03x1")
    learner.write(KV_BYTES_GAP, "return 7")
    asked = learner.workshop("solution", "03x1")
    assert asked.returncode == 1
    assert KV_BYTES not in asked.stdout
    shown = learner.workshop("solution", "03x1", "--yes")
    assert shown.returncode == 0
    assert "-    return 7" in shown.stdout
    assert f"+    {KV_BYTES}" in shown.stdout
    assert "hint:" not in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("start", "42"), "There is no phase '42'; there are 01a, 01b"),
        (("hint", "06.1"), "There is no exercise '06.1'; the number of an exercise is its phase, an x and a count"),
        (("check",), "Nothing has been started in"),
    ],
)
def test_wrong_numbers_are_refused_with_those_that_exist(
    learner: Learner, arguments: tuple[str, ...], message: str
) -> None:
    refused = learner.workshop(*arguments)
    assert refused.returncode == 2
    assert message in refused.stderr
    assert not learner.workspace.exists()


def test_a_failure_is_one_screen_that_names_cases_place_and_mistake(learner: Learner) -> None:
    """Also with lines that no known mistake is written in: it is recognised by what it does."""
    learner.workshop("start", "03", "--only", "03x4")
    learner.write(
        f'raise NotImplementedError("{find_exercise("03x4").message}")',
        "seen = self.keys[layer].shape[1]\n"
        "        begin = max(0, self.num_past + 2 - window) if window else 0\n"
        "        keys = self.keys[layer].narrow(1, begin, seen - begin)\n"
        "        values = self.values[layer].narrow(1, begin, seen - begin)\n"
        "        return self.attention(q, keys, values, scale=scale, window=window, softcap=softcap)",
    )
    checked = learner.check("03", "--only", "03x4")
    assert checked.returncode == 1
    lines = checked.stdout.splitlines()
    assert len(lines) <= 30
    assert "✗ test_logits_do_not_depend_on_how_the_prompt_is_cut, 18 of 24 cases pass" in checked.stdout
    assert "            gemma3_text  ✓      ✗           ✗       ✗" in lines
    assert "✓ test_a_cap_on_scores_is_the_same_over_the_cache" in checked.stdout
    assert "smallest failing case: test_logits_do_not_depend_on_how_the_prompt_is_cut[gemma3_text-one by one-" in (
        checked.stdout
    )
    assert any(line.strip().startswith("logits, token 15, vocabulary 0: expected ") for line in lines)
    assert "right: token 0-14" in checked.stdout
    assert "This looks like: the window starts one token too late: it includes the token itself." in checked.stdout


def test_the_reference_s_lines_in_another_gap_are_neither_shown_nor_pointed_at(learner: Learner) -> None:
    """A missing transpose fails in `write`, an exercise of its own that the learner has not done."""
    learner.workshop("start", "03")
    gap = 'raise NotImplementedError("exercise 03x2: slice the cache for this step")'
    lines = reference(find_exercise("03x2"))[1].lines
    learner.write(f"        {gap}", "\n".join(lines).replace("[:, :, start:].transpose(1, 2)", "[:, :, start:]"))
    checked = learner.check("03", "--only", "03x2", "--verbose")
    assert "RuntimeError: The size of tensor a (24)" in checked.stdout
    assert "raised in lines that are not yours" in checked.stdout
    assert "copy_" not in checked.stdout
    assert "contiguous.py:" not in checked.stdout
    assert checked.stdout.count("Error: The size of tensor") == 2, "once in the screen, once in a traceback"
    assert "not transposed to [T, Hkv, D]" in checked.stdout


def test_a_mistake_in_one_exercise_costs_no_other_its_result(learner: Learner) -> None:
    learner.workshop("start", "03")
    for number, change in (("03x2", ("self.num_past = start", "self.num_past = end")), ("03x3", ("", ""))):
        exercise = find_exercise(number)
        lines = "\n".join(reference(exercise)[1].lines).replace(*change)
        learner.write(f'        raise NotImplementedError("{exercise.message}")', lines)
    checked = learner.check("03")
    outcomes = [line.split("  ")[1] for line in checked.stdout.splitlines() if line.startswith("03x")]
    assert outcomes == ["to do", "failed", "passed", "to do"]
    assert "This looks like: num_past counts the new tokens too." in checked.stdout
    learner.write("self.num_past = end", "self.num_past = start")
    assert f"1 of {len(exercises())} passed" in learner.workshop("status").stdout, "03x3's lines are as they were"


def test_a_file_that_is_no_utf_8_costs_no_other_its_result(learner: Learner) -> None:
    learner.workshop("start", "03")
    learner.workshop("start", "02x5")
    stopping, exercise = learner.workspace / find_exercise("02x5").path, find_exercise("02x5")
    for file, each in ((learner.cache, find_exercise("03x3")), (stopping, exercise)):
        learner.write(f'raise NotImplementedError("{each.message}")', "\n".join(reference(each)[1].lines).strip(), file)
    content = learner.cache.read_bytes().replace(b"class ", b"# caf\xe9\nclass ", 1)
    learner.cache.write_bytes(content)
    checked = learner.check()
    assert checked.returncode == 1
    assert re.search(r"02x5 +passed", checked.stdout), checked.stdout
    assert re.search(r"03x1 +to do", checked.stdout), checked.stdout
    assert re.search(r"03x3 +not run", checked.stdout), checked.stdout
    offset = content.index(b"\xe9")
    line = content.count(b"\n", 0, offset) + 1
    assert f"{learner.cache} is no UTF-8 text: byte 0xe9 at offset {offset}; save it as UTF-8" in checked.stdout
    assert f"contiguous.py:{line}" in checked.stdout
    assert f"1 of {len(exercises())} passed" in learner.workshop("status").stdout


def test_watch_checks_each_save_and_goes_on_to_the_next(learner: Learner) -> None:
    environment = {**os.environ, "INFER_WORKSPACE": str(learner.workspace), "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-c", "from shared.cli import app; app()", "workshop", "watch", "03"]
    pipe = subprocess.PIPE
    watch = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, text=True, preexec_fn=heed_interrupts)
    assert watch.stdout is not None

    def until(text: str, never: str = "\0") -> None:
        """Read lines until one holds the text; none before it may hold the other."""
        assert watch.stdout is not None
        seen = []
        for line in watch.stdout:
            seen.append(line)
            assert never not in line, "".join(seen)
            if text in line:
                return
        pytest.fail(f"{text!r} is not in {''.join(seen)}")

    try:
        until("1 of 4: 03x1 what one token costs")
        until("each time you save")
        learner.write(KV_BYTES_GAP, "import time; time.sleep(600)")
        until("checking 03x1")
        learner.write("import time; time.sleep(600)", KV_BYTES.replace("num_kv_heads", "num_heads"))
        until("This looks like: query heads are counted where KV heads are stored", never="TimeoutError")
        other = learner.workspace / "shared/ops/rmsnorm.py"
        other.parent.mkdir()
        other.write_text((ROOT / "shared/ops/rmsnorm.py").read_text())
        until(f"saved: {other}; but what is checked is 03x1, in {learner.cache}")
        learner.write("num_heads", "num_kv_heads")
        until("03x1  passed")
        until("2 of 4: 03x2 slice the cache")
        watch.send_signal(signal.SIGINT)
        assert "1 of 4 passed" in watch.stdout.read()
        assert watch.wait(PATIENCE) == 0
    finally:
        watch.kill()
        watch.communicate()

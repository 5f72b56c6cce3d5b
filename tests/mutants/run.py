"""Faults, written down as small patches, that the tests of their module must find.

    make mutants shared/grammar        # with the suite's settings: one order of sets, one thread a process

``tests/mutants/shared/grammar/tokens/masks.patch`` holds the faults of ``shared/grammar/tokens/masks.py``; how they are
written, `tutorial.workshop.faults` says.

Each fault is put into a copy of the tree, and its tests run there until one fails, those of kernels in a process of
their own. A test that does not end counts as
having found it. Without any fault the same tests must pass. The exit status is 1 if a fault was not found, and 2 if a
patch does not apply or tests fail without a fault.
Invariant: the process that forks for each run has imported no module of the course, that may contain a fault.
"""

import argparse
import importlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tutorial.workshop.faults import PATCHES, ROOT, Faults, read_faults

MOST_SECONDS = 120  # of one run, in which a fault is to be found; twice a minute, as two run at once
FORKS = multiprocessing.get_context("fork")
LARGE = ("torch", "transformers", "scipy.stats", "hypothesis.stateful", "tokenizers", "typer", "rich.progress")
"""Libraries that are imported once, for all forks."""


def find(paths: Iterable[str]) -> list[Faults]:
    """The faults of the modules at or below these paths; all of them without a path."""
    found = []
    for path in paths or [""]:
        at = PATCHES / path
        patches = [at.with_suffix(".patch")] if at.suffix == ".py" else sorted(at.rglob("*.patch"))
        if not patches or not patches[0].exists():
            raise ValueError(f"there are no faults of {path} in {PATCHES.relative_to(ROOT)}")
        found += [read_faults(patch) for patch in patches]
    return found


class Finding:
    """A plugin that remembers the first test that failed; examples that fail are not made smaller."""

    def __init__(self) -> None:
        self.test = ""

    def pytest_configure(self) -> None:  # after the repository's profile was loaded, before tests are imported
        from hypothesis import Phase, settings

        settings.register_profile("mutants", settings.default, phases=[Phase.explicit, Phase.generate])
        settings.load_profile("mutants")

    def pytest_runtest_logreport(self, report) -> None:  # type: ignore[no-untyped-def]
        if report.failed and not self.test:
            self.test = report.nodeid

    def pytest_collectreport(self, report) -> None:  # type: ignore[no-untyped-def]
        self.pytest_runtest_logreport(report)


def test(copy: Path, tests: tuple[str, ...], log: Path, answer) -> None:  # type: ignore[no-untyped-def]
    """In a fork: run these tests in the copy until one fails, and send pytest's status and that test's name."""
    os.setsid()
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(copy)
    sys.path[0] = os.environ["PYTHONPATH"] = str(copy)
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    if tests[0].startswith("tests/kernels"):
        os.environ["TRITON_INTERPRET"] = "1"
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "tutorial")]:
        del sys.modules[name]
    import pytest

    finding = Finding()
    options = ["-x", "-q", "-m", "not measured", "-p", "no:cacheprovider", "--basetemp", f"{log}.d"]
    status = pytest.main([*options, *tests], plugins=[finding])
    answer.send((int(status), finding.test))
    os._exit(0)


def run(copy: Path, tests: tuple[str, ...], log: Path) -> tuple[int, str]:
    """pytest's exit status and the first test that failed; -1 where the run did not end in time or died."""
    receiver, sender = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=test, args=(copy, tests, log, sender))
    process.start()
    sender.close()
    try:
        if receiver.poll(MOST_SECONDS):
            return receiver.recv()  # type: ignore[no-any-return]
        return -1, f"no end within {MOST_SECONDS} s"
    except EOFError:
        return -1, "the process of the tests died"
    finally:
        try:
            os.killpg(process.pid or 0, signal.SIGKILL)
        except ProcessLookupError:
            process.kill()
        process.join()
        shutil.rmtree(f"{log}.d", ignore_errors=True)


def processes(tests: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The tests that run in one process: those of kernels, which Triton's interpreter runs, after the others."""
    kernels = tuple(each for each in tests if each.startswith("tests/kernels"))
    return [part for part in (tuple(each for each in tests if each not in kernels), kernels) if part]


def copies(folder: Path, count: int) -> Iterator[Path]:
    """Copies of the files of this tree that git knows or does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    for number in range(count):
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (ROOT / name).is_file():
                (folder / str(number) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / str(number) / name)
        yield folder / str(number)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutants", description="put faults into a copy, and let tests find them")
    parser.add_argument("paths", nargs="*", help="modules or folders, such as shared/grammar; all without any")
    paths = parser.parse_args().paths
    try:
        found = find(paths)
        texts = {each.module: (ROOT / each.module).read_text(encoding="utf-8") for each in found}
        runs = [(each.tests, each.module, "no fault", texts[each.module]) for each in found]
        runs += [(each.tests, f.module, str(f), f.applied(texts[f.module])) for each in found for f in each.faults]
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    import pytest

    for name in LARGE:
        importlib.import_module(name)
    at_once = max(1, min(4, os.cpu_count() or 1))
    not_found, broken, started = [], [], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as name, ThreadPoolExecutor(at_once) as pool:
        free: SimpleQueue[Path] = SimpleQueue()
        for copy in copies(Path(name), at_once):
            free.put(copy)

        def judge(number: int) -> tuple[int, str, float]:
            tests, module, _, text = runs[number]
            copy, since = free.get(), time.monotonic()
            try:
                (copy / module).write_text(text, encoding="utf-8")
                for part in processes(tests):
                    status, by = run(copy, part, Path(name) / f"{number}.log")
                    if status != pytest.ExitCode.OK:
                        break
                return status, by, time.monotonic() - since
            finally:
                (copy / module).write_text(texts[module], encoding="utf-8")
                free.put(copy)

        for number, (status, by, seconds) in enumerate(pool.map(judge, range(len(runs)))):
            _, module, about, _ = runs[number]
            if about == "no fault":
                if status != pytest.ExitCode.OK:
                    broken.append(module)
                    print(f"  BROKEN {seconds:5.1f} s  {module}: tests fail without a fault: {by}")
                    print((Path(name) / f"{number}.log").read_text(encoding="utf-8")[-2000:])
            elif status in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED, -1):
                print(f"   found {seconds:5.1f} s  {about}\n                    by {by}")
            else:
                not_found.append(about)
                print(f"NOT found {seconds:4.1f} s  {about}")
            sys.stdout.flush()
    count, seconds = len(runs) - len(found), time.monotonic() - started
    print(f"{count - len(not_found)} of {count} faults of {len(found)} modules found in {seconds:.0f} s")
    return 2 if broken else 1 if not_found else 0


if __name__ == "__main__":
    sys.exit(main())

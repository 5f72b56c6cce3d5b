"""Runs of many versions of exercises: known mistakes, or gaps, each judged by the tests of its exercise alone.

Versions share one run of pytest (`tutorial.workshop.versions`), wherever the function can be replaced after its module
was imported; those whose tests are of kernels share one that is interpreted. Where it cannot (without forks; tests of
both sorts), each version is a run of its own, in a workspace that holds its module.
"""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from shared.kernels import NO_TRITON
from tutorial.workshop import check
from tutorial.workshop.check import KERNEL_TESTS, CheckServer, Run, RunEndedError
from tutorial.workshop.exercises import Exercise, source_of
from tutorial.workshop.versions import AT_ONCE, VERSIONS, Version, can_replace

Watch = Callable[[int, Path], None]


def run_versions(
    server: CheckServer, versions: Sequence[tuple[Exercise, str]], watch: Watch | None = None
) -> list[Run]:
    """A run for each version, given as its exercise and the text of its module; all else is the reference's.

    ``watch`` as in `CheckServer.run`.
    """
    with tempfile.TemporaryDirectory(prefix="versions-") as name, ThreadPoolExecutor(AT_ONCE) as pool:
        folder = Path(name).resolve()
        for number, (exercise, text) in enumerate(versions):
            module = folder / str(number) / exercise.path
            module.parent.mkdir(parents=True)
            module.write_text(text, encoding="utf-8")
        found: dict[int, Run] = {}
        for is_interpreted in (False, True):
            together = {
                number: exercise
                for number, (exercise, text) in enumerate(versions)
                if _can_share(server, exercise, text, is_interpreted)
            }
            if together:
                found |= _run_together(server, together, folder, is_interpreted, watch)
        others = [number for number in range(len(versions)) if number not in found]
        found |= zip(
            others,
            pool.map(lambda n: server.run(folder / str(n), [versions[n][0]], gaps_raise=True, watch=watch), others),
            strict=True,
        )
    return [found[number] for number in range(len(versions))]


def _can_share(server: CheckServer, exercise: Exercise, text: str, is_interpreted: bool) -> bool:
    sorts = {test.startswith(KERNEL_TESTS) for test in exercise.tests}
    can_run = server.forks and not (is_interpreted and NO_TRITON)
    return can_run and sorts == {is_interpreted} and can_replace(text, source_of(exercise), exercise.target)


def _run_together(
    server: CheckServer, versions: Mapping[int, Exercise], folder: Path, is_interpreted: bool, watch: Watch | None
) -> dict[int, Run]:
    """The runs, by number, of versions whose modules lie in folders of that number."""
    listed = [
        Version(str(folder / str(n) / e.path), str(folder / f"{n}.jsonl"), e.module, e.target, e.tests)
        for n, e in versions.items()
    ]
    (folder / "versions.json").write_text(json.dumps([asdict(version) for version in listed]), encoding="utf-8")
    record = folder / f"record-{is_interpreted}.jsonl"
    variables = {
        **check.variables_of(folder / "workspace", gaps_raise=True),
        **check.recording(record, list(versions.values())),
        VERSIONS: str(folder / "versions.json"),
        "PYTEST_DEBUG_TEMPROOT": str(folder),  # of `tmp_path`: each fork would look through all that other runs left
    }
    # The files by which pytest captures descriptors would be shared by all forks.
    options = ["-p", "tutorial.workshop.versions", "--capture=sys", "--tb=no"]
    tests = dict.fromkeys(test for exercise in versions.values() for test in exercise.tests)
    seconds, output = check.most_seconds(list(versions.values())), ""
    try:
        code, output = server.run_pytest(
            [*options, *tests], variables, is_interpreted, seconds, None, check.look_at(record, watch)
        )
        ended = check.how_it_ended(code, seconds)
    except RunEndedError as reason:
        ended = str(reason)
    of_all = check.entries_of(record, folder, gaps_raise=True)
    return {
        number: check.judged(
            [exercise],
            [*of_all, *check.entries_of(folder / f"{number}.jsonl", folder / str(number), gaps_raise=True)],
            folder / str(number),
            dict.fromkeys(exercise.tests, ended),
            output,
        )
        for number, exercise in versions.items()
    }

"""Every known mistake proved: applied, it fails, and is recognised as itself, with few others beside it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from shared.kernels import NO_TRITON
from tutorial.workshop.check import CheckServer, can_be_checked
from tutorial.workshop.exercises import Exercise, exercises
from tutorial.workshop.mistakes import MOST_ALIKE, Mistake, is_alike, run_mistakes
from tutorial.workshop.verdicts import Outcome, Verdict

pytestmark = pytest.mark.slow

Known = dict[Exercise, dict[Mistake, Verdict]]


@pytest.fixture(scope="module")
def known(request: pytest.FixtureRequest, check_server: CheckServer, session_folder: Path) -> Callable[[str], Known]:
    """By collected exercise of a phase, what its known mistakes do; kept where `test_workshop` finds them. Each phase
    runs once, even if that raises."""
    own = [item for item in request.session.items if item.path == request.path]
    collected = [item.callspec.params["exercise"] for item in own]
    results: dict[str, Known | Exception] = {}

    def of(phase: str) -> Known:
        if phase not in results:
            wanted = [each for each in collected if each.phase == phase and can_be_checked(each)]
            try:
                results[phase] = run_mistakes(check_server, wanted, session_folder / "mistakes")
            except Exception as error:
                results[phase] = error
        result = results[phase]
        if isinstance(result, Exception):
            raise result
        return result

    return of


@pytest.mark.parametrize("exercise", exercises(), ids=lambda exercise: exercise.number)
def test_every_known_mistake_fails_and_is_recognised(exercise: Exercise, known: Callable[[str], Known]) -> None:
    if not can_be_checked(exercise):
        pytest.skip(f"{NO_TRITON}")
    verdicts = known(exercise.phase)[exercise]
    assert len(verdicts) >= 3
    for mistake, verdict in verdicts.items():
        assert verdict.outcome is Outcome.FAILED, (mistake.says, verdict.reason)
        alike = {other.says for other, its_verdict in verdicts.items() if is_alike(verdict, its_verdict)}
        assert mistake.says in alike
        assert len(alike) <= MOST_ALIKE, (mistake.says, alike)

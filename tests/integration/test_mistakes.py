"""Every known mistake proved: applied, it fails, and is recognised as itself and as no other."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from shared.kernels import NO_TRITON
from tutorial.workshop.check import CheckServer, can_be_checked
from tutorial.workshop.exercises import Exercise, exercises
from tutorial.workshop.mistakes import Mistake, is_alike, run_mistakes
from tutorial.workshop.verdicts import Outcome, Verdict

pytestmark = pytest.mark.slow

Known = dict[Exercise, dict[Mistake, Verdict]]


@pytest.fixture(scope="module")
def known(check_server: CheckServer, session_folder: Path) -> Callable[[str], Known]:
    """By exercise of a phase, what its known mistakes do; kept where `test_workshop` finds them."""

    @cache
    def of(phase: str) -> Known:
        wanted = [exercise for exercise in exercises() if exercise.phase == phase and can_be_checked(exercise)]
        return run_mistakes(check_server, wanted, session_folder / "mistakes")

    return of


@pytest.mark.parametrize("exercise", exercises(), ids=lambda exercise: exercise.number)
def test_every_known_mistake_fails_and_is_recognised_as_itself(
    exercise: Exercise, known: Callable[[str], Known]
) -> None:
    if not can_be_checked(exercise):
        pytest.skip(f"{NO_TRITON}")
    verdicts = known(exercise.phase)[exercise]
    assert len(verdicts) >= 3
    for mistake, verdict in verdicts.items():
        assert verdict.outcome is Outcome.FAILED, (mistake.says, verdict.reason)
        alike = [other.says for other, its_verdict in verdicts.items() if is_alike(verdict, its_verdict)]
        assert set(alike) == {mistake.says}

"""Every known mistake proved: applied, it fails, and is recognised as itself and as no other."""

from pathlib import Path

import pytest

from shared.kernels import NO_TRITON
from tutorial.workshop.check import CheckServer, can_be_checked
from tutorial.workshop.exercises import Exercise, exercises
from tutorial.workshop.mistakes import is_alike, run_mistakes
from tutorial.workshop.verdicts import Outcome

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("exercise", exercises(), ids=lambda exercise: exercise.number)
def test_every_known_mistake_fails_and_is_recognised_as_itself(
    exercise: Exercise, check_server: CheckServer, session_folder: Path
) -> None:
    if not can_be_checked(exercise):
        pytest.skip(f"{NO_TRITON}")
    known = run_mistakes(check_server, exercise, session_folder / "mistakes")  # where `test_workshop` finds them
    assert len(known) >= 3
    for mistake, verdict in known.items():
        assert verdict.outcome is Outcome.FAILED, (mistake.says, verdict.reason)
        alike = [other.says for other, its_verdict in known.items() if is_alike(verdict, its_verdict)]
        assert set(alike) == {mistake.says}

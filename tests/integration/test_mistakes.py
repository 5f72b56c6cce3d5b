"""Every known mistake proved: applied, it fails, and is recognised as itself, with few others beside it."""

from pathlib import Path

import pytest

from shared.kernels import NO_TRITON
from tutorial.workshop.check import CheckServer, can_be_checked
from tutorial.workshop.exercises import Exercise, exercises
from tutorial.workshop.mistakes import MOST_ALIKE, Mistake, is_alike, run_mistakes
from tutorial.workshop.verdicts import Outcome, Verdict

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def known(
    request: pytest.FixtureRequest, check_server: CheckServer, session_folder: Path
) -> dict[Exercise, dict[Mistake, Verdict]]:
    """By collected exercise, what its known mistakes do, in one run; kept where `test_workshop` finds them."""
    collected = [item.callspec.params["exercise"] for item in request.session.items if item.path == request.path]
    return run_mistakes(check_server, list(filter(can_be_checked, collected)), session_folder / "mistakes")


@pytest.mark.parametrize("exercise", exercises(), ids=lambda exercise: exercise.number)
def test_every_known_mistake_fails_and_is_recognised(
    exercise: Exercise, known: dict[Exercise, dict[Mistake, Verdict]]
) -> None:
    if not can_be_checked(exercise):
        pytest.skip(f"{NO_TRITON}")
    verdicts = known[exercise]
    assert len(verdicts) >= 3
    for mistake, verdict in verdicts.items():
        assert verdict.outcome is Outcome.FAILED, (mistake.says, verdict.reason)
        alike = {other.says for other, its_verdict in verdicts.items() if is_alike(verdict, its_verdict)}
        assert mistake.says in alike
        assert len(alike) <= MOST_ALIKE, (mistake.says, alike)

"""A pytest plugin that writes down what a page's known mistakes do, while a file from empty is compared with them.

``INFER_FROM_EMPTY_PROOF`` names the file to write: JSON, pairs of a sentence and the cases of all tests. Loaded with
``-p tests.from_empty_proof``, beside ``--from-empty``.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from tutorial.workshop.from_empty_mistakes import Diagnosis, PageMistake
from tutorial.workshop.verdicts import Case

PROOF = "INFER_FROM_EMPTY_PROOF"


def pytest_configure() -> None:
    found, cases_with = list[tuple[str, list[object]]](), Diagnosis.cases_with

    def noted(
        diagnosis: Diagnosis, mistake: PageMistake, items: Sequence[pytest.Item], own: Sequence[Case]
    ) -> list[Case]:
        """Also after the first case that is another than in ``own``."""
        cases = cases_with(diagnosis, mistake, items)
        found.append((mistake.says, [asdict(case) for case in cases]))
        Path(os.environ[PROOF]).write_text(json.dumps(found), encoding="utf-8")
        return cases

    Diagnosis.cases_with = noted  # type: ignore[method-assign]

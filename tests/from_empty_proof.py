"""A pytest plugin that writes down what a page's known mistakes do, instead of the tests of a file from empty.

``INFER_FROM_EMPTY_PROOF`` names the file to write: JSON, pairs of a sentence and the cases of the tests. Loaded with
``-p tests.from_empty_proof``, beside ``--from-empty``.
"""

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from tutorial.workshop.from_empty_mistakes import Diagnosis, page_mistakes

PROOF = "INFER_FROM_EMPTY_PROOF"


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    diagnosis = Diagnosis()
    session.config.pluginmanager.register(diagnosis)
    phase = session.items[0].path.parent.name.removeprefix("phase_")
    found = [
        [mistake.says, [asdict(case) for case in diagnosis.cases_with(mistake, session.items)]]
        for mistake in page_mistakes(phase)
    ]
    Path(os.environ[PROOF]).write_text(json.dumps(found), encoding="utf-8")
    return True

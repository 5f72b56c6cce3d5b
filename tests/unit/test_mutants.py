"""The faults that `make mutants` puts into modules fit the modules as they are."""

import ast

import pytest

from tests.mutants.run import find
from tutorial.workshop.faults import ROOT, Fault


@pytest.mark.parametrize("faults", find([]), ids=lambda faults: str(faults.module))
def test_faults_apply(faults):
    text = (ROOT / faults.module).read_text(encoding="utf-8")
    for fault in faults.faults:
        applied = fault.applied(text)
        ast.parse(applied)
        assert applied != text, fault
    promises = [fault.promise for fault in faults.faults]
    assert len(promises) == len(set(promises))


def test_a_hunk_stands_in_the_module_once(tmp_path):
    fault = Fault(tmp_path, "twice", (("a\n", "b\n"),))
    assert fault.applied("a\nc\n") == "b\nc\n"
    for text in ("a\na\n", "c\n"):
        with pytest.raises(ValueError, match="not once"):
            fault.applied(text)

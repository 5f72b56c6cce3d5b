"""Which engines are compared: the contenders, the table of experiments, and the rows and gains of the matrix."""

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.run_matrix import add_gains, configurations
from benchmarks.serving.contenders import CONTENDERS, lineup
from benchmarks.serving.experiments import EXPERIMENTS
from benchmarks.serving.view import COLUMNS
from benchmarks.workloads.serving import DEMO
from shared.engine.config import EngineConfig
from shared.lessons import lessons


def test_every_name_in_the_tables_is_one_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {name for name, *_ in CONTENDERS}
    for experiment in EXPERIMENTS:
        under = {each.under for each in experiment.ratios}
        assert {*experiment.contenders, *experiment.needs, *under} <= names
        assert set(experiment.shows) <= set(COLUMNS)
        assert all(hasattr(DEMO, workload) for workload in experiment.workloads)
        assert set(experiment.resized(DEMO) if experiment.resized else ()) <= set(experiment.contenders)
    assert set(lineup()) == names - {"vllm"}
    assert names - set(lineup("05")) == {"paged", "newest", "vllm"}
    monkeypatch.setattr("benchmarks.serving.contenders.is_installed", lambda: True)
    shown = {name: contender.title for name, contender in lineup("06.1").items()}
    assert set(shown) == names
    phases = {"sequential": "03.1", "static": "04", "continuous": "05", "paged": "06", "newest": "06.1", "http": "06.1"}
    assert {name: shown[name].rpartition("phase ")[2].rstrip(")") for name in phases} == phases


def test_a_phase_is_a_row_of_the_matrix_and_each_alternative_another() -> None:
    rows = configurations([lesson for lesson in lessons() if lesson.generates], is_gpu=True)
    policies = ["05 scheduler_policy=prefill_first", "05 scheduler_policy=decode_round_robin"]
    names = [row.name for _, row in rows]
    assert names[3:9] == ["04", "05", *policies, "06", "06 kv_cache_backend=contiguous"]
    for lesson, row in rows:
        EngineConfig(**row.settings).check(lesson.load("engine").SUPPORTED)
        for name, value in row.settings.items():
            assert value != EngineConfig.__dataclass_fields__[name].default, "a default is no row of its own"
    later: Any = [SimpleNamespace(number=n, title="", engine=None) for n in ("06.1", "07")]
    assert [row.name for _, row in configurations(later, is_gpu=False)] == [
        "06.1",
        "07",
        "07 use_chunked_prefill=False",
    ]


def test_gains_are_over_the_first_row_and_over_the_phase_before_in_its_defaults() -> None:
    speeds = {"02": 10.0, "04": 40.0, "05": 60.0, "05 x=1": 20.0}
    results: dict[str, Any] = {
        row: {"settings": row[3:]} | {w: {"output_tokens_per_second": speed} for w in ("w1", "w2", "w3")}
        for row, speed in speeds.items()
    }
    add_gains(results)
    assert [r["w1"]["gain_over_first"] for r in results.values()] == [1.0, 4.0, 6.0, 2.0]
    assert [r["w3"]["gain_over_previous"] for r in results.values()] == [None, 4.0, 1.5, 0.5]

"""Which engines are compared: the contenders, the table of experiments, and the rows and gains of the matrix."""

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.run_matrix import ALTERNATIVES, add_gains, configurations
from benchmarks.serving.contenders import CONTENDERS, lineup, roles
from benchmarks.serving.experiments import EXPERIMENTS
from benchmarks.serving.view import COLUMNS
from benchmarks.workloads.serving import DEMO
from shared.engine.config import EngineConfig
from shared.lessons import lessons


def phase(number: str, *, many: bool = True, continuous: bool = True, blocks: bool = True) -> Any:
    engine = SimpleNamespace(SCHEDULERS={"continuous": 0} if continuous else {}, MEMORY={"paged": 0} if blocks else {})
    shown = SimpleNamespace(add_request=0) if many else SimpleNamespace()
    return SimpleNamespace(number=number, engine=shown, load=lambda part: engine)


MAIN = [
    phase("03", many=False),
    phase("03.1", many=False),
    phase("04", continuous=False, blocks=False),
    phase("05", blocks=False),
    phase("06"),
    phase("06.1"),
    phase("07"),
]


@pytest.mark.parametrize(
    ("last", "newest"), [("05", {}), ("06", {"blocks": "06"}), ("07", {"blocks": "06", "newest": "07"})]
)
def test_each_idea_is_shown_by_its_own_phase_and_the_newest_stands_beside_them(last: str, newest: Any) -> None:
    found = roles(MAIN, next(lesson for lesson in MAIN if lesson.number == last))
    usual = {"sequential": "03.1", "static": "04", "slots": "05", "last": last}
    assert {role: lesson.number for role, lesson in found.items()} == usual | newest


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
    assert set(lineup()) == names


def test_a_phase_is_a_row_of_the_matrix_and_each_alternative_another() -> None:
    rows = [row for _, row in configurations([lesson for lesson in lessons() if lesson.generates], is_gpu=True)]
    assert [row.name for row in rows][3:9] == [
        "04",
        "05",
        "05 scheduler_policy=prefill_first",
        "05 scheduler_policy=decode_round_robin",
        "06",
        "06 kv_cache_backend=contiguous",
    ]
    for lesson, row in configurations([lesson for lesson in lessons() if lesson.generates], is_gpu=True):
        EngineConfig(**row.settings).check(lesson.load("engine").SUPPORTED)
    for settings in (each for rows_of_phase in ALTERNATIVES.values() for each in rows_of_phase):
        config = EngineConfig(**settings)
        for name, value in settings.items():
            assert value != EngineConfig.__dataclass_fields__[name].default, "a default is no row of its own"
            assert config.is_on(name) is bool(value)
    later: Any = [SimpleNamespace(number=n, title="", engine=None) for n in ("06.1", "07")]
    assert [row.name for _, row in configurations(later, is_gpu=False)] == [
        "06.1",
        "07",
        "07 use_chunked_prefill=False",
    ]


def test_gains_are_over_the_first_row_and_over_the_phase_before_in_its_defaults() -> None:
    def row(phase: str, speed: float) -> dict[str, Any]:
        return {"phase": phase, "w1": {"output_tokens_per_second": speed}}

    results = {"02": row("02", 10.0), "04": row("04", 40.0), "05": row("05", 60.0), "05 x=1": row("05", 20.0)}
    add_gains(results, {"02": "01b", "01b": None, "03": "02", "04": "03", "05": "04"}, ["w1"])
    assert [r["w1"]["gain_over_first"] for r in results.values()] == [1.0, 4.0, 6.0, 2.0]
    assert [r["w1"]["gain_over_previous"] for r in results.values()] == [None, 4.0, 1.5, 0.5]

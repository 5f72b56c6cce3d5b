"""Which engines are compared: the contenders of the benchmark, and the rows and gains of the matrix."""

from types import SimpleNamespace
from typing import Any

from benchmarks.run_matrix import OPTIMIZATIONS, REPLACED, add_gains, configurations
from benchmarks.serving.lineup import draw_up
from shared.engine.config import EngineConfig
from shared.lessons import lessons


def phase(number: str, *, many: bool = True, continuous: bool = True, blocks: bool = True) -> Any:
    engine = SimpleNamespace(SCHEDULERS={"continuous": 0} if continuous else {}, MEMORY={"paged": 0} if blocks else {})
    shown = SimpleNamespace(add_request=0) if many else SimpleNamespace()
    return SimpleNamespace(number=number, engine=shown, load=lambda part: engine)


def test_each_idea_is_shown_by_its_own_phase_and_the_newest_stands_beside_them() -> None:
    main = [
        phase("03", many=False),
        phase("03.1", many=False),
        phase("04", continuous=False, blocks=False),
        phase("05", blocks=False),
        phase("06"),
        phase("06.1"),
        phase("07"),
    ]
    every = ("sequential", "padded", "static", "continuous", "paged", "newest")
    for last, number_of_contenders in (("05", 4), ("06", 5), ("06.1", 6), ("07", 6)):
        found = draw_up(main, next(lesson for lesson in main if lesson.number == last))
        assert found.contenders == every[:number_of_contenders]
        assert (found.sequential.number, found.regions.number, found.newest.number) == ("03.1", "05", last)
        in_blocks = [lesson.number for lesson in found.in_blocks.values()]
        assert in_blocks == {"05": [], "06": ["06"]}.get(last, ["06", last])
    side = draw_up(main, phase("06.2"))
    assert side.in_blocks["newest"].number == "06.2"


def test_every_phase_has_a_row_and_each_of_its_optimizations_another() -> None:
    rows = configurations([lesson for lesson in lessons() if lesson.generates])
    found = [row.name for row in rows]
    assert found[:5] == ["02", "03", "03.1", "04", "05"]
    assert found[5:7] == ["05 scheduler_policy=prefill_first", "05 scheduler_policy=decode_round_robin"]
    assert found[7:9] == ["06", "06 kv_cache_backend=contiguous"]
    assert set(OPTIMIZATIONS) | set(REPLACED) <= set(EngineConfig.__dataclass_fields__)
    for row in rows:
        EngineConfig(**row.settings).check(row.lesson.load("engine").SUPPORTED)
    numbers = ["05", "06", "06.1", *(f"{n:02}" for n in range(7, 11))]
    later = configurations([SimpleNamespace(number=number) for number in numbers])  # type: ignore[misc]
    for row in later:
        EngineConfig(**row.settings)  # what a setting needs is beside it
    assert [row.name for row in later if row.settings] == [
        "05 scheduler_policy=prefill_first",
        "05 scheduler_policy=decode_round_robin",
        "06 kv_cache_backend=contiguous",
        "06.1 attention_backend=flash",
        "07 use_chunked_prefill=True",
        "08 kv_cache_backend=paged use_prefix_caching=True",
        "09 use_cuda_graphs=True",
        "10 quantization=fp8",
        "10 quantization=int8",
    ]


def test_on_a_cpu_no_row_repeats_another_under_a_kernels_name() -> None:
    found = [SimpleNamespace(number=number) for number in ("06", "06.1")]
    names = [row.name for row in configurations(found, "cpu")]  # type: ignore[arg-type]
    assert names == ["06", "06 kv_cache_backend=contiguous", "06.1"]


def test_gains_are_over_the_first_row_and_over_the_phase_before_in_its_defaults() -> None:
    def row(phase: str, speed: float) -> dict[str, Any]:
        return {"phase": phase, "w1": {"output_tokens_per_second": speed}}

    results = {"02": row("02", 10.0), "04": row("04", 40.0), "05": row("05", 60.0), "05 x=1": row("05", 20.0)}
    add_gains(results, {"02": "01b", "01b": None, "03": "02", "04": "03", "05": "04"}, ["w1"])
    assert [r["w1"]["gain_over_first"] for r in results.values()] == [1.0, 4.0, 6.0, 2.0]
    assert [r["w1"]["gain_over_previous"] for r in results.values()] == [None, 4.0, 1.5, 0.5]

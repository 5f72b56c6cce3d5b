"""Other cuts than the kernels' tables have, timed as a decode step would run them. Introduced in phase 3.1.

The tables of ``shared.kernels`` are plain constants: which cut is best shows only on the chip, under a graph, with cold
inputs. This is the search that finds better ones. Every variant is compiled first, on all cores; then each is checked
and timed, and the best few once more with more trials, since the fastest of hundreds is in part the luckiest.

Invariant: a cut that gives a wrong result, or none, is never among the best.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from benchmarks.bench_kernels import check_options, describe_shape
from benchmarks.device.graph_timing import cache_bytes, num_input_sets, time_calls
from benchmarks.device.precompile import Compilation, compile_all, recorded_launches
from benchmarks.hardware import device_of, measure_ceilings
from benchmarks.kernels.cases import ModelShapes
from benchmarks.kernels.check import compare, reference
from benchmarks.kernels.variants import SWEPT, Variant, applied, variants_of
from benchmarks.report import Report, rounded
from shared.checkpoints.shapes import SHAPES
from shared.errors import ConfigError
from shared.loading.config_json import parse_config

KEPT = 5
TRIALS, FINAL_TRIALS = 3, 9
MIN_CALLS, FINAL_MIN_CALLS = 64, 256


def compilations_of(groups: Iterable[Sequence[Variant]], device: torch.device) -> list[Compilation]:
    """What compiles every variant of the groups, each of which takes the same inputs unless its variants are small."""
    with recorded_launches() as compilations:
        for variants in groups:
            shared = None if variants[0].make_small else variants[0].make().draw(1, device)[0]
            for variant in variants:
                with applied(variant):
                    case = (variant.make_small or variant.make)()
                    case.ours(*(shared or case.draw(1, device)[0]))
    return list(compilations.values())


def sweep(variants: Sequence[Variant], device: torch.device) -> dict[str, Any]:
    """Time all, the best once more; the first of ``variants`` is what the table has."""
    case = variants[0].make()
    sets = case.draw(num_input_sets(case.set_bytes, cache_bytes(device)), device)
    expected = reference(case, sets[0])

    def seconds(variant: Variant, trials: int, min_calls: int) -> float:
        with applied(variant):
            ours = variant.make()
            error, _, _ = compare(ours, sets[0], expected)
            if error is not None:
                raise RuntimeError(error)
            return time_calls(ours.ours, sets, trials=trials, min_calls=min_calls).seconds

    timed: list[tuple[float, Variant]] = []
    failures: list[str] = []
    for variant in variants:
        try:
            timed.append((seconds(variant, TRIALS, MIN_CALLS), variant))
        except Exception as error:  # too much shared memory, too many registers: no cut for this chip
            failures.append(f"{variant.settings}: {type(error).__name__}: {str(error)[:160]}")
    timed.sort(key=lambda pair: pair[0])
    best = [variant for _, variant in timed[:KEPT]]

    def result(variant: Variant) -> dict[str, Any]:
        return {"settings": variant.settings, "time_us": rounded(1e6 * seconds(variant, FINAL_TRIALS, FINAL_MIN_CALLS))}

    return {
        "shape": case.shape,
        "bytes": case.num_bytes,
        "ceiling": case.ceiling,
        "tried": len(variants),
        "table": result(variants[0]) if any(variant is variants[0] for _, variant in timed) else None,
        "best": sorted((result(variant) for variant in best), key=lambda one: one["time_us"]),
        "failures": failures,
    }


def sweep_kernels(
    models: Sequence[str],
    *,
    device: str,
    kernels: Sequence[str] | None = None,
    rows: Sequence[int] | None = None,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[Report]:
    """Search the cuts of each model's kernels; a report for each model as it is finished.

    Args:
        kernels: names of ``SWEPT``; None: all.
        rows: None: 1.
        say: called with a line about each step.

    Raises ConfigError without a GPU, and for what cannot be swept.
    """
    check_options(models, kernels, rows, 1, seed)
    if torch.device(device).type != "cuda":
        raise ConfigError("--sweep looks for the best cuts of a GPU's kernels and this is a CPU; leave it out here.")
    for kernel in kernels or ():
        if kernel not in SWEPT:
            raise ConfigError(
                f"--kernel is {kernel!r}, which has no constants to sweep; these have: {', '.join(SWEPT)}."
            )
    where = device_of(device)
    chosen, sizes = tuple(kernels or SWEPT), tuple(rows or (1,))
    torch.manual_seed(seed)
    ceilings = measure_ceilings(device)
    found = {name: variants_of(ModelShapes(parse_config(SHAPES[name], name)), chosen, sizes, where) for name in models}
    compilations = compilations_of((group for of_model in found.values() for group in of_model.values()), where)
    say(f"compiling {len(compilations)} variants")
    failed = compile_all(compilations, lambda done, total: say(f"{done} compiled") if done % 100 == 0 else None)
    say(f"compiled {len(compilations) - failed}; {failed} cannot be")
    del compilations
    for name, of_model in found.items():
        results: dict[str, dict[str, Any]] = {}
        for (kernel, size), variants in of_model.items():
            results.setdefault(kernel, {})[size] = swept = sweep(variants, where)
            table, best = swept["table"], swept["best"]
            now = "fails" if table is None else f"{table['time_us']} µs"
            fastest = f"{best[0]['time_us']} µs with {best[0]['settings']}" if best else "none works"
            say(f"{name} {kernel} {size}: table {now}, best of {swept['tried']}: {fastest}")
        yield Report(
            name="kernel-sweep",
            model=describe_shape(name),
            engines={},
            seed=seed,
            flags={"kernels": list(chosen), "rows": list(sizes), "device": device},
            results={"ceilings": ceilings.results(), "sweep": results},
            device=device,
        )

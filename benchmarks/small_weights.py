"""What weights of 8 and 4 bits buy on a CPU: a decode step beside fp32's, its products, and the bytes that they read.
Introduced in phase 10.

Engines hold the same prompts and take turns, step by step. Invariant: what is compared was measured in the same run,
the bandwidth of the memory too.

    python -m benchmarks.small_weights --out benchmarks/reports
"""

import statistics
import time
from typing import Any

import torch

from benchmarks.command import run
from benchmarks.hardware import measure_ceilings
from benchmarks.report import Report, describe_model, engine_settings, rounded
from benchmarks.timing import SyntheticPrompts
from benchmarks.view import Column, Table, View, number, text, times
from shared.engine.config import EngineConfig
from shared.lessons import find_lesson
from shared.models.fused import FusedProjection
from shared.models.quantized import FusedQuantizedProjection
from shared.quantization.weight import QuantizedWeight
from shared.sampling.params import SamplingParams

WEIGHTS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "int8": {"quantization": "int8"},
    "int8_head": {"quantization": "int8", "quantize_head": True},
    "int4": {"quantization": "int4"},
    "int4_head": {"quantization": "int4", "quantize_head": True},
}
TITLES = {"fp32": "fp32", "int8": "INT8", "int8_head": "INT8, head too", "int4": "INT4", "int4_head": "INT4, head too"}
BATCHES, PROMPT = {"one": 1, "sixteen": 16}, 32  # requests that decode together; tokens of their prompts
LONG = 512  # tokens of the prompt that is timed


def products_of(engine: Any) -> list[Any]:
    """The projections of a decode step."""
    kinds = FusedProjection, FusedQuantizedProjection
    return [module for module in engine.model.modules() if isinstance(module, kinds)]


def num_bytes(weight: Any) -> int:
    """What a product reads of a matrix."""
    return int(weight.num_bytes if isinstance(weight, QuantizedWeight) else weight.nbytes)


@torch.inference_mode()
def products_seconds(engine: Any, num_requests: int) -> float:
    """All products of a step, one after the other, without what is between them."""
    products = products_of(engine)
    inputs = {width: torch.randn(num_requests, width) for width in {product.weight.shape[1] for product in products}}
    started = time.perf_counter()
    for product in products:
        product(inputs[product.weight.shape[1]])
    return time.perf_counter() - started


def measure(model: str = "smollm2-135m", steps: int = 40, trials: int = 3) -> Report:
    """Steps of 1 and 16 requests, and a prompt, with weights of each kind."""
    room = PROMPT + steps + 8
    about: dict[str, Any] = {"model": model, "max_seq_len": max(LONG + 8, room), "max_batch_size": 16, "seed": 0}
    about |= {"num_gpu_blocks": 16 * (room // 16 + 1) + LONG // 16, "use_prefix_caching": False}
    engines = {name: find_lesson("10").engine(EngineConfig(**about, **kind)) for name, kind in WEIGHTS.items()}
    prompts = SyntheticPrompts(engines["fp32"].model.config.vocab_size, 0)
    bandwidth = measure_ceilings("cpu").read_bytes_per_second / 1e9
    results: dict[str, Any] = {}
    for name, engine in engines.items():
        results[name] = {"gigabytes": rounded(sum(num_bytes(product.weight) for product in products_of(engine)) / 1e9)}
    for size, num_requests in BATCHES.items():
        drawn = [prompts.draw(PROMPT) for _ in range(num_requests)]
        for engine in engines.values():
            for prompt in drawn:
                engine.add_request(prompt, SamplingParams(temperature=0.0, max_new_tokens=steps, ignore_eos=True))
            while engine.load().num_waiting or engine.last_step is None or engine.last_step.prefilled:
                engine.step()
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        products: dict[str, list[float]] = {name: [] for name in engines}
        while all(engine.load().num_running == num_requests for engine in engines.values()):
            for name, engine in engines.items():
                started = time.perf_counter()
                engine.step()
                seconds[name].append(time.perf_counter() - started)
                products[name].append(products_seconds(engine, num_requests))
        for name, engine in engines.items():
            while engine.has_work():
                engine.step()
            results[name][f"{size}_ms"] = rounded(1e3 * statistics.median(seconds[name][2:]))
            results[name][f"{size}_products_ms"] = rounded(1e3 * statistics.median(products[name][2:]))
    firsts: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(trials):
        prompt = prompts.draw(LONG)
        for name, engine in engines.items():
            started = time.perf_counter()
            list(engine.generate(prompt, SamplingParams(temperature=0.0, max_new_tokens=1)))
            firsts[name].append(time.perf_counter() - started)
    for name, found in results.items():
        found["prompt_ms"] = rounded(1e3 * statistics.median(firsts[name]))
        found["limit_ms"] = rounded(1e3 * found["gigabytes"] / bandwidth)
        for what in (*BATCHES, "prompt"):
            found[f"{what}_x"] = rounded(results["fp32"][f"{what}_ms"] / found[f"{what}_ms"], 3)
    told = describe_model(model)
    settings = {name: engine_settings(engine.config, told["name"]) for name, engine in engines.items()}
    flags = {"steps": steps, "trials": trials, "prompt": PROMPT, "long_prompt": LONG}
    return Report("small-weights", told, settings, 0, flags, {"engines": results, "gb_per_s": rounded(bandwidth)})


def view(report: Report) -> View:
    """One table."""
    columns = [text("weights", "title"), Column("GB", "gigabytes", number), Column("read in, ms", "limit_ms")]
    for what, title in (("one", "a token, ms"), ("sixteen", "a step of 16, ms"), ("prompt", "a prompt, ms")):
        columns += [Column(title, f"{what}_ms"), Column("over fp32", f"{what}_x", times)]
        columns += [] if what == "prompt" else [Column("its products, ms", f"{what}_products_ms")]
    rows = [{"title": TITLES[name]} | found for name, found in report.results["engines"].items()]
    about = [f"{report.machine_title}; {report.date[:10]}"]
    notes = [f"Read in: the bytes of the weights over {report.results['gb_per_s']} GB/s, measured in the same run."]
    return View(f"Weights of 8 and 4 bits: {report.model['name']}", about, [Table("", columns, rows)], notes)


if __name__ == "__main__":
    run(measure, view, __doc__)

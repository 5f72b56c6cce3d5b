"""Overlapping launches compute what the same launches in a row do: one by one in the interpreter, captured on a GPU."""

import math
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shared.attention.descriptor import DevicePlan
from shared.attention.plan import plan_decode
from shared.kernels import launch
from shared.kernels.attention import kv_write, merge_states, planned_attention
from shared.kernels.attention.planned_tiling import DecodeTiling
from shared.kernels.attention.planned_workspace import PlannedWorkspace
from shared.kernels.launch import INTERPRETED, generation
from shared.kernels.products import gated, gemv, rmsnorm
from shared.kernels.sampling import cuts, draw, peak, sampler, search
from shared.ops.gated import swiglu
from shared.sampling.params import SamplingParams
from shared.sampling.sampler import SamplingBatch, SamplingRow
from tests.comparison import assert_equal

NAN = float("nan")
MODULES = (gated, gemv, kv_write, merge_states, planned_attention, rmsnorm)
EVERY_STEP = {"rms_norm_kernel", "gated_kernel", "kv_write_kernel", "planned_decode_kernel"}
CONSTANTS = {
    *("weight", "bias", "norm_weight", "post_weight", "q_weight", "k_weight", "table", "positions", "offsets"),
    *("tables", "table_starts", "lengths"),
    *("num_items", "split_size", "request_indices", "kv_tile_indices", "output_indptr"),
}
"""Parameters that no kernel of a step writes: only these may be read above the wait."""
BLOCK_SIZE = 16
NUM_INPUTS = 8
NUM_REPLAYS = 4800


class Step:
    """The kernels of a decode step of two layers, one with the norms of Llama and one with those of Gemma."""

    def __init__(
        self,
        randn: Callable,
        lengths: list[int],
        H: int,
        Hq: int,
        Hkv: int,
        D: int,
        I: int,  # noqa: E741
        dtype: torch.dtype,
    ) -> None:
        device, B = randn(1).device, len(lengths)
        self.heads, self.D, self.I, self.scale = (Hq, Hkv, Hkv), D, I, D**-0.5

        def matrix(rows: int, columns: int) -> torch.Tensor:
            return randn(rows, columns, dtype=dtype, scale=columns**-0.5)

        def norm(n: int) -> Any:
            return SimpleNamespace(weight=randn(n, dtype=dtype), eps=1e-5, offset=1.0)

        def ints(numbers: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.as_tensor(numbers, dtype=dtype).to(device)

        blocks = -(-max(lengths) // BLOCK_SIZE)  # of each sequence
        order = torch.randperm(B * blocks, generator=torch.Generator().manual_seed(0))
        last = torch.tensor(lengths) - 1
        self.slots = ints(
            order.view(B, blocks)[torch.arange(B), last // BLOCK_SIZE] * BLOCK_SIZE + last % BLOCK_SIZE, torch.int64
        )
        self.positions, self.offsets = ints(last, torch.int64), ints(self.slots.cpu() * Hkv * D, torch.int64)
        self.paged = ints(order), ints(torch.arange(0, B * blocks, blocks)), ints(lengths)
        table = randn(max(lengths), 2, 1, D)
        self.layers = [
            SimpleNamespace(
                qkv=matrix((Hq + 2 * Hkv) * D, H),
                o=matrix(H, Hq * D),
                gate_up=matrix(2 * I, H),
                down=matrix(H, I),
                norm=norm(H),
                post_norm=post_norm,
                qk=SimpleNamespace(table=table, q_norm=qk_norm, k_norm=qk_norm),
                keys=randn(B * blocks, BLOCK_SIZE, Hkv, D, dtype=dtype),
                values=randn(B * blocks, BLOCK_SIZE, Hkv, D, dtype=dtype),
            )
            for post_norm, qk_norm in ((None, None), (norm(H), norm(D)))
        ]

    def plan(self, tiling: DecodeTiling) -> None:
        lengths, device = self.paged[-1], self.paged[-1].device
        grid = tiling.grid(self.heads[1], device)
        plan = plan_decode(lengths.tolist(), grid, is_captured=True)
        self.device_plan = DevicePlan.of(plan, [torch.from_numpy(array).to(device) for array in plan.arrays()])
        self.tiling = tiling
        self.workspace = PlannedWorkspace.of(grid.max_states(), len(lengths), *self.heads[:2], self.D, device)

    def poison(self) -> None:
        """NaN wherever the step writes before it reads; memory of a graph's pool too, which the step then gets."""
        self.workspace.partial.fill_(NAN)
        self.workspace.partial_log.fill_(NAN)
        for layer in self.layers:
            for memory in (layer.keys, layer.values):
                memory.flatten(0, 1).index_fill_(0, self.slots, NAN)
        for block in [torch.empty(2**20, dtype=torch.uint8, device=self.slots.device) for _ in range(2)]:
            block.fill_(255)  # a segment of small tensors, in two pieces; in every float format NaN

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            norm, post_norm = layer.norm, layer.post_norm
            qkv = gemv.linear(x, layer.qkv, None, norm).view(len(x), -1, self.D)
            q, k, v = qkv.split_with_sizes(self.heads, 1)
            memory = layer.keys, layer.values
            q = kv_write.kv_write(q, k, v, self.positions, layer.qk, *memory, self.offsets, self.D)
            arguments: dict[str, Any] = {"scale": self.scale, "tiling": self.tiling, "workspace": self.workspace}
            out = planned_attention.planned_decode(q, *memory, *self.paged, self.device_plan, **arguments).flatten(1)
            if post_norm is None:
                x = gemv.linear(out, layer.o, residual=x)
                h = gemv.linear(x, layer.gate_up, norm=norm, activation=swiglu)
                x = gemv.linear(h, layer.down, residual=x)
            else:
                h = gemv.linear(out, layer.o)
                h, x = rmsnorm.add_rms_norm(h, x, norm.weight, norm.eps, norm.offset, post_norm)
                h = gemv.linear(h, layer.gate_up)
                h = gemv.linear(gated.swiglu(h[:, : self.I], h[:, self.I :]), layer.down)
                x = rmsnorm.rms_norm(h, norm.weight, norm.eps, norm.offset, residual=x)
        return x


def storages(args: Iterable[Any]) -> dict[int, torch.Tensor]:
    """The memory of the tensors among the arguments, as bytes by address."""
    found = [arg.untyped_storage() for arg in args if isinstance(arg, torch.Tensor)]
    return {one.data_ptr(): torch.empty(0, dtype=torch.uint8).set_(one) for one in found}  # type: ignore[call-overload]


def launch_late(kernel, grid, args, options, memory, late, modules, waits_first=False):
    """Launch a kernel in the worst overlap that is allowed.

    From the start of a program to its wait, the memory at the addresses ``late`` is 0xFF, in floats NaN: the previous
    kernel has written nothing yet. A program that reads such memory too early, writes to ``memory`` too early or does
    not wait is found; with ``waits_first`` one too that permits the next launch before it waits.
    """
    builder = launch.interpreter.interpreter_builder
    set_place = builder.set_grid_idx
    at_start: dict[int, torch.Tensor] = {}
    num_waits = 0

    def start(*place: int) -> None:
        assert not at_start, "the program before this one did not wait"
        set_place(*place)
        at_start.update({place: content.clone() for place, content in memory.items()})
        for place in late:
            memory[place].fill_(255)

    def wait(PDL: object) -> None:
        nonlocal num_waits
        for place, content in memory.items():
            is_same = (content == 255).all() if place in late else content.equal(at_start[place])
            assert is_same, f"{kernel.__name__} writes before it waits"
            content.copy_(at_start[place])
        at_start.clear()
        num_waits += 1

    def permit(PDL: object) -> None:
        assert not (waits_first and at_start), f"{kernel.__name__} permits the next launch before it waits"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "set_grid_idx", start)
        for module in modules:
            patch.setattr(module, "wait_for_previous", wait, raising=False)
            patch.setattr(module, "launch_dependents", permit, raising=False)
        launch.launch(kernel, grid, *args, **options)
    assert num_waits == math.prod(grid), f"waits of {kernel.__name__}, which every program must make"


@pytest.mark.skipif(not INTERPRETED, reason="programs run one after another in the interpreter only")
@pytest.mark.parametrize("is_arrival", [True, False], ids=["arrival", "launch"])
@pytest.mark.parametrize("lengths", [[41], [40, 3, 17]], ids=len)
def test_before_the_wait_only_constants_are_read_and_nothing_is_written(lengths, is_arrival, randn, monkeypatch):
    step = Step(randn, lengths, H=32, Hq=2, Hkv=1, D=16, I=16, dtype=torch.float32)
    step.plan(DecodeTiling(tile=16, least_split=16, is_arrival=is_arrival))
    x = randn(len(lengths), 32)
    step.poison()
    expected = step.run(x)
    assert expected.isfinite().all()

    launched: set[str] = set()

    def launch_step(kernel, grid, *args, **options):
        """Whatever a kernel of the step writes is late."""
        memory = storages(arg for name, arg in zip(kernel.arg_names, args, strict=False) if name not in CONSTANTS)
        launch_late(kernel, grid, args, options, memory, memory.keys(), MODULES)
        launched.add(kernel.__name__)

    for module in MODULES:
        monkeypatch.setattr(module, "launch", launch_step)
    step.poison()
    assert_equal(step.run(x), expected, "result of kernels whose previous kernel ends late", ("row", "column"))
    products = {"gemv_kernel" if len(lengths) == 1 else "skinny_kernel"}
    assert launched == EVERY_STEP | products | ({"merge_states_kernel"} if not is_arrival else set())


@pytest.mark.gpu
@pytest.mark.parametrize("is_arrival", [True, False], ids=["arrival", "launch"])
@pytest.mark.parametrize("rows", [1, 2, 8, 16])
def test_thousands_of_replays_equal_the_kernels_one_by_one(rows, is_arrival, randn, monkeypatch):
    """Inputs take turns, so that what an earlier replay left is wrong too, as is the poison."""
    step = Step(randn, [1 + 97 * n % 700 for n in range(1, rows + 1)], 2048, 32, 8, 64, 4096, torch.bfloat16)
    step.plan(DecodeTiling(tile=64, is_arrival=is_arrival))
    inputs = randn(NUM_INPUTS, rows, 2048, dtype=torch.bfloat16)
    if not generation(inputs.device).has_pdl:
        pytest.skip("GPUs before Hopper have no programmatic dependent launch")
    torch._C._set_deterministic_algorithms(False)  # its fills would come between the kernels

    with monkeypatch.context() as patch:
        one_by_one(patch, MODULES)
        expected = torch.stack(list(results(step, inputs)))
    assert expected.isfinite().all()
    assert not torch.equal(expected[0], expected[1])

    monkeypatch.setattr(launch, "_COMPILED", {})
    for _ in range(20):
        assert_equal(torch.stack(list(results(step, inputs))), expected, "results of overlapping launches")
    assert all(run.launch_pdl for run, *_ in launch._COMPILED.values()), "a kernel of the step does not overlap"

    x, graph = inputs[0].clone(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step.poison()
        out = step.run(x)
    for _ in range(NUM_REPLAYS // (12 * NUM_INPUTS)):
        replayed = []
        for i in range(12 * NUM_INPUTS):
            x.copy_(inputs[i % NUM_INPUTS])
            graph.replay()
            replayed.append(out.clone())
        assert_equal(torch.stack(replayed), expected.repeat(12, 1, 1), "results of replays")


def one_by_one(patch: pytest.MonkeyPatch, modules: Iterable[Any]) -> None:
    """The same machine code, launched without overlap; the host waits for each kernel."""

    def launch_and_wait(*args: Any, **options: Any) -> None:
        launch.launch(*args, **options)
        torch.cuda.synchronize()

    patch.setattr(launch, "_COMPILED", {})
    patch.setattr(launch, "overlap", lambda kernel, gpu: {"PDL": True})
    for module in modules:
        patch.setattr(module, "launch", launch_and_wait)


def results(step: Step, inputs: torch.Tensor) -> Iterable[torch.Tensor]:
    for x in inputs:
        step.poison()
        yield step.run(x)


DRAWS: list[list[dict[str, Any]]] = [
    [{}],
    [{"top_p": 0.95}],
    [{"top_k": 50}],
    [{"top_k": 50, "top_p": 0.9}, {}, {"top_p": 0.8}, {"min_p": 0.01, "top_p": 0.95}, {"temperature": 0.0}],
]
"""Parameters that the rows of a draw have in turn."""


def batch_of(settings: list[dict[str, Any]], rows: int, device: torch.device) -> SamplingBatch:
    params = [SamplingParams(**settings[n % len(settings)]) for n in range(rows)]
    return SamplingBatch.of([SamplingRow(each, n, n) for n, each in enumerate(params)], device=device)


@pytest.mark.skipif(not INTERPRETED, reason="programs run one after another in the interpreter only")
@pytest.mark.parametrize("settings", DRAWS, ids=str)
def test_a_draw_uses_nothing_of_the_previous_launch_before_the_wait(settings, randn, device, monkeypatch):
    """From the start of a program to its wait, what the previous launch wrote is 0xFF, in floats NaN. For the first
    launch that is all memory, since any launch may have come before."""
    logits, batch = randn(5, 1500, scale=2.0), batch_of(settings, 5, device)
    expected = sampler.sample(logits, batch)
    written: set[int] | None = None
    launched: list[str] = []

    def launch_draw(kernel, grid, *args, **options):
        nonlocal written
        memory = storages(args)
        before = {place: content.clone() for place, content in memory.items()}
        late = memory.keys() if written is None else memory.keys() & written
        launch_late(kernel, grid, args, options, memory, late, (peak, cuts, search, draw), waits_first=True)
        written = {place for place, content in memory.items() if not content.equal(before[place])}
        launched.append(kernel.__name__)

    monkeypatch.setattr(sampler, "launch", launch_draw)
    assert_equal(sampler.sample(logits, batch), expected, "tokens where each previous launch ends late", ("row",))
    assert len(launched) == (2 if settings == [{}] else 5)


@pytest.mark.gpu
@pytest.mark.parametrize("settings", DRAWS, ids=str)
@pytest.mark.parametrize("rows", [1, 64])
def test_thousands_of_replayed_draws_equal_the_kernels_one_by_one(rows, settings, randn, device, monkeypatch):
    """A graph of draws from different logits, one after the other; before each replay a copy writes the indices."""
    if not generation(device).has_pdl:
        pytest.skip("GPUs before Hopper have no programmatic dependent launch")
    torch._C._set_deterministic_algorithms(False)  # its fills would come between the kernels
    inputs = randn(NUM_INPUTS, rows, 128_256, scale=1.5)
    batch, counters = batch_of(settings, rows, device), sampler.make_counters(rows, device)
    indices = torch.arange(4 * rows, device=device).view(4, rows)
    assert batch.indices is not None

    def draws() -> torch.Tensor:
        return torch.stack([sampler.sample(logits, batch, counters=counters) for logits in inputs])

    expected = []
    with monkeypatch.context() as patch:
        one_by_one(patch, (sampler,))
        for index in indices:
            batch.indices.copy_(index)
            expected.append(draws())
    assert not torch.equal(expected[0], expected[1])

    monkeypatch.setattr(launch, "_COMPILED", {})
    draws()
    assert all(run.launch_pdl for run, *_ in launch._COMPILED.values()), "a kernel of the draw does not overlap"
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        ids = draws()
    for _ in range(NUM_REPLAYS // (4 * NUM_INPUTS)):
        replayed = []
        for index in indices:
            batch.indices.copy_(index)
            graph.replay()
            replayed.append(ids.clone())
        assert_equal(torch.stack(replayed), torch.stack(expected), "tokens of replays")

"""The sum over ranks through shared memory: between processes under Triton's interpreter, and between GPUs."""

import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shared.kernels.launch import INTERPRETED
from shared.tracks.ranks.collectives import Collectives
from shared.tracks.ranks.group import local_store
from shared.tracks.ranks.kernels import all_reduce as module
from tests.kernels.bounds import REACHABLE

ROOT = Path(__file__).parents[2]
interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")


@dataclass
class Peers:
    rank: int
    size: int
    addresses: torch.Tensor
    counters: torch.Tensor
    stop: torch.Tensor


def inputs(rank: int, call: int, T: int, n: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x and the residual. Each row begins with -0.0 on all ranks; in most calls some have NaN and words of all ones."""
    generator = torch.Generator().manual_seed(100 * call + rank)
    x = torch.randn(T, n, generator=generator).to(dtype)
    residual = torch.randn(T, n, generator=torch.Generator().manual_seed(call)).to(dtype)
    x[:, 0] = residual[:, 0] = -0.0
    if call % 3 != 2:
        x[:, 1 + rank] = torch.nan
        x.view(torch.int32)[:, 10 + rank :: 9] = -1
    return x, residual


CALLS = [(1, 64), (3, 48), (1, 64), (4, 96), (2, 64), (1, 2048)]
SHOTS = {1: 1 << 60, 2: 0}  # and the ``TWO_SHOT_BYTES`` that makes a sum have so many


def in_processes(size, run, *args):
    """Start ``run(peers, *args)`` for each rank; their memories, stops and processes."""
    memories = [torch.full((module.num_words(size),), -1, dtype=torch.int32).share_memory_() for _ in range(size)]
    stops = [torch.zeros(1, dtype=torch.int32).share_memory_() for _ in range(size)]
    addresses = torch.tensor([memory.data_ptr() for memory in memories])
    REACHABLE[:] = memories
    processes = []
    for rank in range(size):
        peers = Peers(rank, size, addresses, torch.zeros(module.CHANNELS, dtype=torch.int32), stops[rank])
        processes.append(multiprocessing.get_context("fork").Process(target=run, args=(peers, *args)))
        processes[-1].start()
    return memories, stops, processes


@pytest.fixture
def few_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHANNELS", 8)
    monkeypatch.setattr(module, "CHANNEL_WORDS", 2048)


def run_rank(peers: Peers, dtype: torch.dtype, found: list[list[dict[int, torch.Tensor]]]) -> None:
    torch.set_num_threads(1)
    for call, (T, n) in enumerate(CALLS):
        x, residual = inputs(peers.rank, call, T, n, dtype)
        for shots in (1, 2) if call % 2 else (2, 1):
            module.TWO_SHOT_BYTES = SHOTS[shots]
            found[peers.rank][call][shots].copy_(module.all_reduce(x, peers, residual if call % 2 else None))


@interpreted
@pytest.mark.parametrize(("size", "dtype"), [(2, torch.float16), (3, torch.float32), (4, torch.float16)])
def test_the_sum_over_ranks(size, dtype, few_channels):
    """Calls of several shapes, so that channels differ in their counts; each rank has the same bits, in both ways."""
    found = [
        [{shots: torch.zeros(T, n, dtype=dtype).share_memory_() for shots in SHOTS} for T, n in CALLS]
        for _ in range(size)
    ]
    memories, _, processes = in_processes(size, run_rank, dtype, found)
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    assert all((memory == -1).all() for memory in memories)
    for call, (T, n) in enumerate(CALLS):
        terms = [inputs(rank, call, T, n, dtype) for rank in range(size)]
        expected = terms[0][0].float()
        for x, _ in terms[1:]:
            expected = expected + x.float()
        if call % 2:
            expected = expected + terms[0][1].float()
        expected = expected.to(dtype)
        first = found[0][call][1]
        torch.testing.assert_close(first, expected, atol=0, rtol=0, equal_nan=True)
        assert first[:, 0].signbit().all()
        for rank in range(size):
            for shots in SHOTS:
                assert torch.equal(found[rank][call][shots].view(torch.int32), first.view(torch.int32))


def run_first_rank(peers: Peers, shots: int) -> None:
    if peers.rank == 0:
        module.TWO_SHOT_BYTES = SHOTS[shots]
        module.all_reduce(torch.ones(2, 64), peers)


@interpreted
@pytest.mark.parametrize("shots", SHOTS)
def test_stop_ends_the_wait_for_a_rank_that_has_gone(shots, few_channels):
    _, stops, processes = in_processes(2, run_first_rank, shots)
    processes[1].join(120)
    time.sleep(0.3)
    assert processes[0].is_alive()
    stops[0].fill_(1)
    processes[0].join(120)
    assert processes[0].exitcode == 0


@pytest.mark.parametrize(
    ("size", "T", "n", "num_programs", "num_pieces", "num_words"),
    [
        (2, 64, 4096, 256, 1, 512),
        (4, 1, 4096, 4, 1, 512),
        (4, 64, 4096, 256, 4, 128),
        (4, 128, 4096, 256, 4, 256),
        (4, 200, 4096, 200, 4, 512),
        (3, 128, 4096, 256, 1, 1024),  # which three cannot share
        (8, 64, 4096, 256, 8, 64),
    ],
)
def test_large_sums_of_more_than_two_ranks_have_two_shots(size, T, n, num_programs, num_pieces, num_words, monkeypatch):
    launched = {}

    def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        launched.update(options, num_programs=grid[0], num_words=args[6])

    monkeypatch.setattr(module, "launch", launch)
    monkeypatch.setattr(module, "tl", torch)  # of which it takes a dtype: there may be no Triton
    nothing = torch.zeros(0)
    x = torch.zeros(T, n, dtype=torch.bfloat16)
    assert module.fits(x)
    module.all_reduce(x, Peers(1, size, nothing, nothing, nothing))
    assert [launched[name] for name in ("num_programs", "PIECES", "num_words")] == [num_programs, num_pieces, num_words]
    assert num_programs * num_pieces * num_words == x.nbytes // 4
    assert launched["num_warps"] * 32 * 4 == launched["BLOCK"]


SHAPES = [(1, 4096), (64, 4096), (64, 4096), (3, 1152), (8, 4096), (128, 2048), (1, 4096), (1, 4096)]


@pytest.mark.gpu
@pytest.mark.several_gpus
@pytest.mark.parametrize("size", [2, 4])
def test_thousands_of_sums_between_gpus(size):
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs, and this machine has {torch.cuda.device_count()}")
    store = local_store()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    commands = [[sys.executable, __file__, str(rank), str(size), str(store.port)] for rank in range(size)]
    ranks = [
        subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True) for command in commands
    ]
    try:
        assert [rank.communicate(timeout=240)[0].strip() for rank in ranks] == ["0 wrong"] * size
    finally:
        for rank in ranks:
            rank.kill()


def race(rank: int, size: int, port: int) -> None:
    """Replay a graph of sums, of one shot and of two, with other numbers each time and with ranks that come late."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    ranks = Collectives(store, rank, size, device)
    peers = ranks.peers
    assert peers is not None
    replay, num_wrong = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))

    def terms_of(call: int, T: int, n: int) -> torch.Tensor:
        """Of all ranks, ``[size, T, n]``: whole numbers, whose sums are exact, and words of all ones."""
        at = torch.arange(size * T * n, device=device).view(size, T, n)
        terms = ((31 * at + 17 * call + 7 * replay) % 61 - 30).bfloat16()
        terms.view(torch.int32)[:, :, call % 5 :: 64] = -1
        return terms

    def chain() -> None:
        replay.add_(1)
        calls = [terms_of(call, *shape) for call, shape in enumerate(5 * SHAPES)]
        totals = []
        for call, terms in enumerate(calls):  # launches overlap, but for those after a sleep
            module.TWO_SHOT_BYTES = SHOTS[1 + call // 3 % 2]
            if (call + 3 * rank) % 7 == 0:
                torch.cuda._sleep(5000 * (1 + (call + rank) % 5))
            totals.append(module.all_reduce(terms[rank], peers, terms[0]))
        for terms, total in zip(calls, totals, strict=True):
            expected = (terms.float().sum(0) + terms[0].float()).bfloat16()
            num_wrong.add_((~((total == expected) | (total.isnan() & expected.isnan()))).sum())

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(250):
        graph.replay()
    torch.cuda.synchronize()
    num_wrong += (peers.memory != -1).sum()
    print(f"{int(num_wrong)} wrong", flush=True)
    ranks.least(0)
    os._exit(0)  # communicators of ranks that have gone may keep a process


if __name__ == "__main__":
    race(*map(int, sys.argv[1:]))

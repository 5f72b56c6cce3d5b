"""The sum over ranks through shared memory, between processes under Triton's interpreter."""

import multiprocessing
from dataclasses import dataclass

import pytest
import torch

from shared.kernels import all_reduce as module
from shared.kernels.launch import INTERPRETED
from shared.models.norm import RMSNorm
from shared.ops.rmsnorm import rms_norm

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")


@dataclass
class Peers:
    rank: int
    size: int
    addresses: torch.Tensor
    counters: torch.Tensor
    stop: torch.Tensor


def norm_of(size: int, dtype: torch.dtype) -> RMSNorm:
    norm = RMSNorm(size, 1e-6, offset=1.0)
    weight = torch.linspace(-0.5, 0.5, size).to(dtype)
    norm.weight = torch.nn.Parameter(weight, requires_grad=False)
    return norm


def inputs(rank: int, call: int, T: int, n: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * call + rank)
    x = torch.randn(T, n, generator=generator).to(dtype)
    return x, torch.randn(T, n, generator=torch.Generator().manual_seed(call)).to(dtype)


CALLS = [(1, 64), (3, 48), (1, 64), (4, 96), (2, 64), (1, 2048)]


def run_rank(peers: Peers, dtype: torch.dtype, found: list[list[torch.Tensor]]) -> None:
    torch.set_num_threads(1)
    norm = None
    for call, (T, n) in enumerate(CALLS):
        x, residual = inputs(peers.rank, call, T, n, dtype)
        norm = norm_of(n, dtype) if call % 3 == 2 else None
        summed, normed = module.all_reduce(x, peers, residual if call % 2 else None, norm)
        found[peers.rank][2 * call].copy_(summed)
        if normed is not None:
            found[peers.rank][2 * call + 1].copy_(normed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", [2, 3])
def test_the_sum_over_ranks(size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of several shapes, so that channels differ in their counts; each rank has the same bits."""
    monkeypatch.setattr(module, "CHANNELS", 8)
    monkeypatch.setattr(module, "CHANNEL_WORDS", 2048)
    memory = [torch.zeros(module.num_words(size), dtype=torch.int64).share_memory_() for _ in range(size)]
    addresses = torch.tensor([part.data_ptr() for part in memory])
    found = [[torch.zeros(T, n, dtype=dtype).share_memory_() for T, n in CALLS for _ in range(2)] for _ in range(size)]
    fork = multiprocessing.get_context("fork")
    ranks = []
    for rank in range(size):
        counters, stop = torch.zeros(8, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        peers = Peers(rank, size, addresses, counters, stop)
        ranks.append(fork.Process(target=run_rank, args=(peers, dtype, found)))
        ranks[-1].start()
    for process in ranks:
        process.join(120)
        assert process.exitcode == 0
    for call, (T, n) in enumerate(CALLS):
        terms = [inputs(rank, call, T, n, dtype) for rank in range(size)]
        expected = terms[0][0].float()
        for x, _ in terms[1:]:
            expected = expected + x.float()
        if call % 2:
            expected = expected + terms[0][1].float()
        expected = expected.to(dtype)
        for rank in range(size):
            assert torch.equal(found[rank][2 * call], expected)
            if call % 3 == 2:
                norm = norm_of(n, dtype)
                torch.testing.assert_close(
                    found[rank][2 * call + 1],
                    rms_norm(expected, norm.weight, norm.eps, norm.offset),
                    atol=2e-3,
                    rtol=2e-3,
                )

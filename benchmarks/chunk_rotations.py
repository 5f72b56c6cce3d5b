"""Three ways to place a chunk's keys: their error in bf16, and what they cost a decode step. Introduced in phase 9.1.

A query's scores against the keys of several documents, of one layer of Llama-3.2-1B's shape. The error is that of the
scores, relative to fp64 without any rounding; *as one prompt* has its keys rotated for their places when they are
written, which is what a chunk cannot have. On a CPU products are fp32, by PyTorch's operations; on a GPU a kernel reads
each key once, and rotates it in registers, from a table of cosines and sines. Its operands are bf16, as a tensor core
has them, so what is rotated when it is read is rounded once more. Invariant: all ways have the same keys and queries.

    python -m benchmarks.chunk_rotations --out benchmarks/reports
"""

import functools
import itertools
from typing import Any

import torch

from benchmarks.command import run
from benchmarks.report import Report, rounded
from benchmarks.timing import cache_bytes, num_input_sets, time_calls
from benchmarks.view import View, table_of
from shared.kernels.launch import launch, launches, tl, triton
from shared.models.config import RopeConfig
from shared.ops.rope import rope_table, rotate

HQ, HKV, D, ROPE = 32, 8, 64, RopeConfig(theta=500_000.0)
WAYS = {"prompt": "as one prompt", "unrotated": "unrotated keys", "keys": "keys, again", "queries": "queries"}
QUESTION, TRIALS = 32, 5


@triton.jit
def scores_kernel(  # type: ignore[no-untyped-def]
    q, keys, table, out, size, length, WAY: tl.constexpr, HKV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (i, j) has the scores of tile j, which is of one document, for KV head i."""
    head, start = tl.program_id(0), tl.program_id(1) * TILE
    r, d, place = tl.arange(0, ROWS), tl.arange(0, D), start + tl.arange(0, TILE)
    swapped, sign = (d + D // 2) % D, tl.where(d < D // 2, -1.0, 1.0)[None, :]
    at_q = q + (head * GROUP + r)[:, None] * D
    query = tl.load(at_q + d[None, :], mask=r[:, None] < GROUP, other=0.0)
    at_k = keys + (place[:, None] * HKV + head) * D
    k = tl.load(at_k + d[None, :])
    if WAY > 0:
        row = place if WAY == 1 else start // length * length + tl.zeros([1], tl.int32)
        at_table = table + row[:, None] * D + d[None, :] % (D // 2)
        cos, sin = tl.load(at_table), tl.load(at_table + D // 2) * sign
        if WAY == 3:
            other = tl.load(at_q + swapped[None, :], mask=r[:, None] < GROUP, other=0.0)
            query = (query.to(tl.float32) * cos - other.to(tl.float32) * sin).to(query.dtype)
        else:
            other = tl.load(at_k + swapped[None, :])
            k = (k.to(tl.float32) * cos + other.to(tl.float32) * sin).to(k.dtype)
    scores = tl.dot(query, tl.trans(k), input_precision="ieee")
    at = (head * GROUP + r)[:, None] * size + place[None, :]
    tl.store(out + at, scores, mask=r[:, None] < GROUP)


def scores(way: int, length: int, q: torch.Tensor, kept: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``[Hq, S]`` of a query ``[1, Hq, D]`` against kept keys ``[S, Hkv, D]``; ``rows``: of :func:`rope_table`."""
    S = len(kept)
    if launches(q):
        out = torch.empty(HQ, S, dtype=torch.float32, device=q.device)
        about = {"HKV": HKV, "GROUP": HQ // HKV, "D": D, "ROWS": 16, "TILE": 64, "num_warps": 4, "num_stages": 1}
        launch(scores_kernel, (HKV, S // 64), q, kept, rows, out, S, length, WAY=way, **about)
        return out
    found = []
    for start in range(0, S, length):  # a document
        keys, moved, at = kept[start : start + length], q.float(), rows[start : start + length]
        if way == 1:
            keys = rotate(keys.float(), at)
        elif way == 2:
            keys = rotate(keys, at[:1])
        elif way == 3:
            moved = rotate(moved, torch.stack((at[:1, 0], -at[:1, 1]), 1))
        found.append((moved.view(HKV, -1, D) @ keys.float().permute(1, 2, 0)).view(HQ, -1))
    return torch.cat(found, 1)


def measure(documents: int = 16, length: int = 1024, device: str = "cpu") -> Report:
    """Errors and times of all ways."""
    S, draw = documents * length, torch.Generator().manual_seed(0)
    raw_q, raw = torch.randn(1, HQ, D, generator=draw), torch.randn(S, HKV, D, generator=draw)
    table, places = rope_table(ROPE, D, S + QUESTION), torch.arange(S)

    def kept(way: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Keys as a way keeps them."""
        at = (places, 0 * places, places % length, places % length)[way]
        return rotate(raw, table[at]).to(dtype)

    q = rotate(raw_q, table[[S + QUESTION - 1]])
    halves = table[:, :, 0, : D // 2].contiguous()  # fp32 [positions, 2, D/2]
    halves[:, 1] *= -1  # the table's first half has the sines negated
    rows = halves if launches(q.to(device)) else table
    exact = (q.double().view(HKV, -1, D) @ kept(0, torch.float64).permute(1, 2, 0)).view(HQ, S)
    num_trials = 1 if device == "cuda" else TRIALS
    results: dict[str, Any] = {name: {"us": float("inf")} for name in WAYS}
    for _, (way, name) in itertools.product(range(num_trials), enumerate(WAYS)):  # the least: other programs run too
        keys, call = kept(way).to(device), functools.partial(scores, way, length)
        inputs = (q.bfloat16().to(device), keys, rows.to(device))
        found = call(*inputs).double().cpu()
        num_sets = num_input_sets(keys.nbytes, cache_bytes(keys.device)) if device == "cuda" else 1
        sets = [(inputs[0], keys.clone(), inputs[2]) for _ in range(num_sets)]
        error = ((found - exact).norm() / exact.norm()).item()
        least = min(results[name]["us"], rounded(1e6 * time_calls(call, sets)))
        results[name] = {"error": float(f"{error:.3g}"), "us": least}
    flags = {"documents": documents, "length": length, "query_heads": HQ, "kv_heads": HKV, "head_size": D}
    return Report("chunk-rotations", {}, {}, 0, flags, results, device)


def view(report: Report) -> View:
    """One table."""
    rows = {WAYS[name]: row for name, row in report.results.items()}
    about = f"{report.flags['documents']} documents of {report.flags['length']} tokens, one query, one layer"
    table = table_of("", "rotated when it is read", rows, error="{:.1e}".format)
    return View("Ways to place a chunk", [about, report.machine_title], [table])


if __name__ == "__main__":
    run(measure, view, __doc__)

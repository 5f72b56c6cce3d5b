"""A model's roofline for a reader: bytes and FLOPs, rates, the floor. Introduced in phase 3.1."""

from collections.abc import Sequence
from typing import Any

from benchmarks.roofline import DecodeWork, Floor
from benchmarks.view import Column, Table, View, count, duration, number, quantity, text


def view(name: str, work: DecodeWork, context: int, ceilings: Any, floors: Sequence[Floor]) -> View:
    """``ceilings``: machine, source, read_bytes_per_second, matmul_flops_per_second; ``floors``: one row each."""
    config, itemsize = work.config, work.dtype.itemsize
    bandwidth, rate = ceilings.read_bytes_per_second, ceilings.matmul_flops_per_second
    narrow = f", {work.weight_bits:g} bits a weight of the blocks" if work.weight_bits else ""
    options = [
        f"{config.family}, {config.num_layers} layers, {str(work.dtype)[6:]}: {itemsize} bytes a number{narrow}",
        f"{ceilings.machine} · {ceilings.source}",
        f"reads {quantity(bandwidth, 'B/s')}, {quantity(rate, 'FLOP/s')} in matrix products: {rate / bandwidth:.1f} "
        "FLOP in the time of one byte; below that, a step waits for memory",
    ]
    weights = Table(
        "What one token reads of the weights",
        [text("part", "part"), Column("parameters", "parameters", count), Column("read", "read", str)],
        _weights(work),
        style=lambda row: "bold" if row["part"] == "all weights" else "",
    )
    steps = Table(
        "The floor at batch 1",
        [text("one token", "what"), text("worked out", "how"), Column("", "result", str)],
        [{"what": what, "how": how, "result": result} for what, how, result in _steps(work, context, bandwidth, rate)],
        style=lambda row: "bold green" if row["what"] == "floor" else "",
    )
    batches = Table(
        f"More sequences share the weights ({context:,} tokens seen by each)",
        [
            Column("batch", "batch", count),
            Column("read", lambda row: quantity(row["num_bytes"], "B"), str),
            Column("memory", "memory_seconds", duration),
            Column("arithmetic", "compute_seconds", duration),
            Column("tokens/s", "tokens_per_second"),
            Column("each", lambda row: row["tokens_per_second"] / row["batch"]),
            text("bound by", "bound"),
        ],
        [vars(floor) | {"tokens_per_second": floor.tokens_per_second, "bound": _bound(floor)} for floor in floors],
    )
    return View(f"Roofline: {name}", options, [weights, steps, batches], [_turning(work, context, bandwidth, rate)])


def _weights(work: DecodeWork) -> list[dict[str, Any]]:
    def row(part: str, parameters: int, num_bytes: int) -> dict[str, Any]:
        return {"part": part, "parameters": parameters, "read": quantity(num_bytes, "B")}

    rows = [row(part, found, work.part_bytes(part)) for part, found in work.parameters.items() if found]
    if work.config.tie_word_embeddings:
        rows[0]["part"] = "embedding, which is the output head too"
    else:
        rows[0]["read"] = f"{quantity(work.row_bytes, 'B')}: one row"
    return [*rows, row("all weights", work.num_parameters, work.weight_bytes + work.row_bytes)]


def _steps(work: DecodeWork, context: int, bandwidth: float, rate: float) -> list[tuple[str, str, str]]:
    """From bytes and FLOPs to the floor: the quantity, its formula, and the result."""
    config, floor = work.config, work.floor(context, bandwidth, rate)
    windows = [window for window in config.windows if window is not None]
    limited = f" ({len(windows)} layers see at most {min(windows):,})" if windows else ""
    kv = f"2 · {config.num_layers} layers · {config.num_kv_heads} KV heads · {config.head_dim} · {work.dtype.itemsize}"
    heads = f"4 · {config.num_heads} heads · {config.head_dim} for each token seen in each layer"
    read, computed = quantity(floor.num_bytes, "B"), quantity(floor.flops, "FLOP")
    return [
        ("keys and values", f"{kv} bytes for each token seen", quantity(work.kv_bytes_per_token, "B")),
        ("", f"{context:,} tokens seen{limited}", quantity(work.kv_bytes(context), "B")),
        ("bytes", "weights, keys and values", read),
        ("products", "a multiplication and an addition for each weight", quantity(work.matmul_flops, "FLOP")),
        ("attention", heads, quantity(work.attention_flops(context), "FLOP")),
        ("FLOPs", "products and attention", computed),
        ("intensity", f"{computed} / {read}", f"{floor.flops / floor.num_bytes:.2f} FLOP/B"),
        ("memory", f"{read} / {quantity(bandwidth, 'B/s')}", duration(floor.memory_seconds)),
        ("arithmetic", f"{computed} / {quantity(rate, 'FLOP/s')}", duration(floor.compute_seconds)),
        ("floor", f"{number(floor.tokens_per_second)} tokens/s: {_bound(floor)} bound", duration(floor.seconds)),
    ]


def _turning(work: DecodeWork, context: int, bandwidth: float, rate: float) -> str:
    turning = work.turning_batch(context, bandwidth, rate)
    if turning is not None:
        return f"From a batch of {turning:,} on, a step waits for arithmetic; a smaller one waits for memory."
    reading, computing = work.kv_bytes(context) / bandwidth, work.flops(context) / rate
    return (
        f"No batch is large enough to wait for arithmetic: each sequence adds {duration(reading)} of reading its keys "
        f"and values, and {duration(computing)} of arithmetic."
    )


def _bound(floor: Floor) -> str:
    return "memory" if floor.is_memory_bound else "arithmetic"

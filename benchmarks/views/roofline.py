"""The roofline of a model as a reader sees it: bytes and FLOPs, ceilings, the floor. Introduced in phase 3.1.

Invariant: every line can be worked out by hand from the lines above it.
"""

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.roofline import DecodeWork, Floor

UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def quantity(value: float, unit: str) -> str:
    """Four digits and the unit with its prefix: ``2.472 GB``, ``786.0 TFLOP/s``."""
    for size, prefix in UNITS:
        if value >= size:
            value, unit = value / size, prefix + unit
            break
    decimals = 3 if value < 10 else 2 if value < 100 else 1
    return f"{value:,.{decimals}f} {unit}" if value != int(value) or value >= 1000 else f"{int(value)} {unit}"


def duration(seconds: float) -> str:
    """Seconds in the unit that they fill: ``818.5 µs``, ``2.310 ms``."""
    size, unit = (1e6, "µs") if seconds < 1e-3 else (1e3, "ms") if seconds < 1 else (1.0, "s")
    value = seconds * size
    return f"{value:,.{3 if value < 10 else 2 if value < 100 else 1}f} {unit}"


def print_roofline(
    console: Console,
    name: str,
    work: DecodeWork,
    context: int,
    ceilings: Any,
    floors: list[Floor],
    turning: int | None,
) -> None:
    """``ceilings``: machine, source, read_bytes_per_second, matmul_flops_per_second."""
    config, itemsize = work.config, work.dtype.itemsize
    bandwidth, rate = ceilings.read_bytes_per_second, ceilings.matmul_flops_per_second
    about = f"{config.family}, {config.num_layers} layers, {_name(work)}: {itemsize} bytes a number"
    console.print(Text.assemble((name, "bold"), f" · {about}"), soft_wrap=True)

    _heading(console, "What one token must read")
    console.print(_weights(work))
    shape = f"2 · {config.num_layers} layers · {config.num_kv_heads} KV heads · {config.head_dim} · {itemsize} bytes"
    _line(console, "keys and values", f"{shape} = {quantity(work.kv_bytes_per_token, 'B')} for each token seen")
    windowed = sum(window is not None for window in config.windows)
    limited = f" ({windowed} layers see at most {_window(work):,})" if windowed else ""
    _line(console, "", f"{context:,} tokens seen{limited}: {quantity(work.kv_bytes(context), 'B')}")
    total = work.num_bytes(context)
    _line(console, "together", quantity(total, "B"), "bold")

    _heading(console, "What one token must compute")
    _line(console, "weights", f"a multiplication and an addition each: {quantity(work.matmul_flops, 'FLOP')}")
    heads = f"4 · {config.num_heads} heads · {config.head_dim} for each token seen in each layer"
    _line(console, "attention", f"{heads}: {quantity(work.attention_flops(context), 'FLOP')}")
    _line(console, "together", quantity(work.flops(context), "FLOP"), "bold")
    _line(console, "intensity", f"{work.intensity(context):.2f} FLOP for each byte read", "bold")

    _heading(console, "What the machine can do")
    _line(console, "machine", f"{ceilings.machine} · {ceilings.source}")
    _line(console, "memory", f"reads {quantity(bandwidth, 'B/s')}")
    _line(console, "arithmetic", f"{quantity(rate, 'FLOP/s')} in matrix products")
    _line(console, "ridge", f"{rate / bandwidth:.1f} FLOP in the time of one byte; below that, a step waits for memory")

    floor = work.floor(context, bandwidth, rate)
    _heading(console, "The floor at batch 1")
    _line(
        console, "memory", f"{quantity(total, 'B')} / {quantity(bandwidth, 'B/s')} = {duration(floor.memory_seconds)}"
    )
    computing = f"{quantity(floor.flops, 'FLOP')} / {quantity(rate, 'FLOP/s')} = {duration(floor.compute_seconds)}"
    _line(console, "arithmetic", computing)
    waits = "memory" if floor.is_memory_bound else "arithmetic"
    verdict = (
        f"no faster than {duration(floor.seconds)} a token, {_rate(floor.tokens_per_second)} tokens/s: {waits} bound"
    )
    _line(console, "floor", verdict, "bold green")

    _heading(console, f"More sequences share the weights ({context:,} tokens seen by each)")
    console.print(_batches(floors))
    console.print(_turning(work, context, bandwidth, rate, turning), style="bright_black", soft_wrap=True)


def _weights(work: DecodeWork) -> Table:
    table = _table("part", "parameters", "read for one token")
    parameters, itemsize, tied = work.parameters, work.dtype.itemsize, work.config.tie_word_embeddings
    for part, count in parameters.items():
        if part == "embedding":
            table.add_row(
                part + (", which is the output head too" if tied else ""),
                f"{count:,}",
                quantity(count * itemsize, "B") if tied else f"{quantity(work.row_bytes, 'B')}: one row",
            )
        elif count:
            table.add_row(part, f"{count:,}", quantity(count * itemsize, "B"))
    read = quantity(work.weight_bytes + work.row_bytes, "B")
    table.add_row("all weights", f"{work.num_parameters:,}", read, style="bold")
    return table


def _batches(floors: list[Floor]) -> Table:
    table = _table("batch", "read", "memory", "arithmetic", "tokens/s in all", "for each", "bound by")
    for floor in floors:
        table.add_row(
            f"{floor.batch:,}",
            quantity(floor.num_bytes, "B"),
            duration(floor.memory_seconds),
            duration(floor.compute_seconds),
            _rate(floor.tokens_per_second),
            _rate(1 / floor.seconds),
            "memory" if floor.is_memory_bound else "arithmetic",
        )
    return table


def _turning(work: DecodeWork, context: int, bandwidth: float, rate: float, turning: int | None) -> str:
    if turning is not None:
        return f"From a batch of {turning:,} on, a step waits for arithmetic; a smaller one waits for memory."
    reading, computing = work.kv_bytes(context) / bandwidth, work.flops(context) / rate
    text = (
        f"No batch is large enough to wait for arithmetic: each sequence adds {duration(reading)} of reading its keys "
        f"and values, and {duration(computing)} of arithmetic."
    )
    short = work.turning_batch(1, bandwidth, rate)
    return text if short is None else f"{text} With one token seen, a batch of {short:,} would be."


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bright_black", show_edge=False)
    table.add_column(first, no_wrap=True)
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _heading(console: Console, text: str) -> None:
    console.print(f"\n{text}", style="bold cyan", soft_wrap=True)


def _line(console: Console, label: str, text: str, style: str = "") -> None:
    console.print(Text.assemble((f"{label:17}", "bright_black"), (text, style)), soft_wrap=True)


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _name(work: DecodeWork) -> str:
    return str(work.dtype).removeprefix("torch.")


def _window(work: DecodeWork) -> int:
    return min(window for window in work.config.windows if window is not None)

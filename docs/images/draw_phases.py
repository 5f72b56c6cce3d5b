"""Draws phases.svg: the throughput of six phases, one server's load on one GPU. Introduced in phase 9.

    python docs/images/draw_phases.py

The figures are those of two committed reports of one workload, model and kind of machine. Invariant: the file in the
repository is what this script writes; a test compares them.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

OUT = Path(__file__).with_name("phases.svg")
REPORTS = Path(__file__).parents[2] / "benchmarks" / "reports"
EARLY = "matrix-llama-3.2-1b-nvidia-h100-80gb-hbm3.json"
LATE = "matrix-06.1-07-08-09-llama-3.2-1b-nvidia-h100-80gb-hbm3.json"
WORKLOAD = "w2"
SHOWN = {
    "02": (EARLY, "each token reads all again"),
    "03": (EARLY, "KV cache"),
    "03.1": (EARLY, "Triton kernels"),
    "04": (EARLY, "a batch of 16"),
    "06": (EARLY, "continuous batching, paged memory"),
    "09": (LATE, "CUDA graphs, overlap"),
}
WIDTH, TOP, ROW, BAR, LEFT, LONGEST = 760, 44, 24, 15, 310, 370

STYLE = """\
    text { font-family: system-ui, sans-serif; font-size: 14px; }
    .bold { font-weight: 600; }
    .small { font-size: 13px; }
    .ink { fill: #1f2937; } .soft { fill: #565f6c; } .bar { fill: #0f766e; }
    @media (prefers-color-scheme: dark) {
      .ink { fill: #e5e7eb; } .soft { fill: #9ca3af; } .bar { fill: #2dd4bf; }
    }
"""


class Bar(NamedTuple):
    """A phase, its idea, and its tokens per second."""

    phase: str
    idea: str
    speed: float


def bars() -> list[Bar]:
    """The bars, from the reports; ValueError where the reports are not of one load, model and kind of machine."""
    reports = {name: json.loads((REPORTS / name).read_text(encoding="utf-8")) for name in (EARLY, LATE)}
    if len({json.dumps(_conditions(report)) for report in reports.values()}) != 1:
        raise ValueError(f"{EARLY} and {LATE} were not measured alike.")
    return [
        Bar(phase, idea, reports[name]["results"][phase][WORKLOAD]["output_tokens_per_second"])
        for phase, (name, idea) in SHOWN.items()
    ]


def _conditions(report: dict[str, Any]) -> list[Any]:
    flags, model = report["flags"], report["model"]
    return [flags["workloads"][WORKLOAD]["about"], flags["dtype"], model["config_sha256"], report["machine_title"]]


def svg(rows: list[Bar]) -> str:
    """The picture of the bars."""
    height = TOP + ROW * len(rows) + 24
    fastest = max(row.speed for row in rows)
    first, last = round(rows[0].speed), round(rows[-1].speed)
    said = ". ".join(f"Phase {row.phase}, {row.idea}: {row.speed:,.0f}" for row in rows)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img" aria-labelledby="title desc">',
        f'  <title id="title">Tokens per second, phase by phase: {first:,} to {last:,}</title>',
        f'  <desc id="desc">Tokens per second with up to 16 requests at a time. {said}.</desc>',
        f"  <style>\n{STYLE}  </style>",
        f'  <text x="20" y="24" class="ink bold">16 requests at a time: {first:,} → {last:,} tokens/s</text>',
    ]
    for index, row in enumerate(rows):
        y = TOP + ROW * index
        length = max(2.0, LONGEST * row.speed / fastest)
        lines += [
            f'  <text x="20" y="{y + 12}" class="soft small">{row.phase}</text>',
            f'  <text x="58" y="{y + 12}" class="ink small">{row.idea}</text>',
            f'  <rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR}" rx="2" class="bar"/>',
            f'  <text x="{LEFT + length + 8:.1f}" y="{y + 12}" class="ink small">{row.speed:,.0f}</text>',
        ]
    said = "Llama 3.2 1B in bf16 on one H100. Phases between them shorten waits, or save memory and computation."
    return "\n".join([*lines, f'  <text x="20" y="{height - 10}" class="soft small">{said}</text>', "</svg>", ""])


if __name__ == "__main__":
    OUT.write_text(svg(bars()), encoding="utf-8")

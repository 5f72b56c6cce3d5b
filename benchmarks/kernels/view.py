"""Both kernel benchmarks, formatted for a reader. Introduced in phase 3.1."""

from collections.abc import Iterator, Sequence

from benchmarks.report import Report
from benchmarks.view import Column, Row, Table, View, number, percent, text, times

DEMO = "demo size: tiny shapes on a CPU, where our launchers call the ops; the figures show the way, not a GPU's speed"
FIGURES = (Column("µs", "time_us"), Column("GB/s", "gb_per_second"), Column("of ceiling", "share_of_ceiling", percent))


def view(report: Report) -> View:
    """For a report of `measure_kernels` or `measure_attention`."""
    flags, ceilings = report.flags, report.results["ceilings"]
    calls = list(calls_of(report))
    reached = f"read {number(ceilings['read_gb_per_second'])} GB/s, copy {number(ceilings['copy_gb_per_second'])} GB/s"
    if ceilings["launch_graph_us"] is not None:
        reached += f", a launch in a graph {ceilings['launch_graph_us']} µs"
    subtitles = [f"{flags['dtype']}; ceilings of this run: {reached}"]
    if "shapes" in report.results:
        what = "mistakes under a CUDA graph" if report.name == "graph-mistakes" else "paged KV cache"
        title = f"Decode attention: {what} on {report.machine_title}"
        plans = ", ".join(f"{us} µs for {count}" for count, us in report.results["planning_us"].items())
        subtitles.append(f"blocks of {flags['block_size']} tokens; a plan of sequences: {plans}")
        columns = [text("shape", "label"), text("", "call"), *FIGURES, Column("/ the first", "over_first", times)]
        columns.append(Column("ours / peer", "ours_over_peer", times))
        rows = [call for call in calls if call["is_ours"] or call["time_us"]]
    else:
        title = f"Kernels: {report.model['name']} on {report.machine_title}"
        subtitles.append("a case's number is its rows, of attention its tokens; floor: its bytes at the ceiling")
        columns = [text("case", "case"), text("shape", "shape"), *FIGURES, Column("floor µs", "floor_us")]
        rows = [call for call in calls if call["is_ours"]]
        columns += [Column("eager µs", "eager_us"), Column("compiled µs", "compiled_us")]
    table = Table("", columns, rows, style=lambda row: "red" if row.get("error") else "")
    subtitles += [DEMO] if flags["is_demo_size"] else []
    return View(title, subtitles, [table], warnings=[*errors(report), *missing(calls)])


def calls_of(report: Report) -> Iterator[Row]:
    """A row for each call that was timed, ours before the peers, with the notes on its case."""
    for kernel, sizes in report.results.get("kernels", {}).items():
        for size, row in sizes.items():
            described = row | {"case": f"{kernel} {size}"}
            yield described | {"call": "ours", "is_ours": True}
            for peer in ("eager", "compiled") if report.flags["compile"] else ("eager",):
                yield described | {"call": peer, "is_ours": False, "missing": row[f"{peer}_missing"]}
    for name, row in report.results.get("shapes", {}).items():
        label = f"{name}: {row['shape']}"
        for calls, is_ours in ((row["variants"], True), (row["peers"], False)):
            for call, figures in calls.items():
                described = row | {"case": name, "label": label, "call": call.replace("_", " "), "is_ours": is_ours}
                described["over_first"] = row.get(f"times_{call}")
                yield described | figures
                label = ""


def errors(report: Report) -> list[str]:
    """A line for each of our wrong results."""
    wrong = (call for call in calls_of(report) if call["is_ours"] and call["error"])
    return [f"wrong: {call['case']} {call['call']}: {call['error']}" for call in wrong]


def missing(calls: Sequence[Row]) -> list[str]:
    """The reason that a peer was not timed."""
    reasons: dict[str, list[str]] = {}
    for call in calls:
        if not call["is_ours"] and (why := call["missing"] or call.get("error")):
            reasons.setdefault(f"no {call['call']}: {why}", []).append(call["case"])
    return [f"{reason} ({', '.join(cases)})" for reason, cases in reasons.items()]

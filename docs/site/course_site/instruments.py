"""Instruments: pictures of a chapter whose settings the reader moves. Introduced in phase 3.

    <!-- {{instrument:roofline model=qwen3-8b machine=h100 bits=16 rows=1}} a question to try -->

The comment shows nothing where a chapter is read as Markdown, which has a still picture or a table there. On the site
it becomes controls, a chart and a table, drawn by the scripts in ``static/instruments``; a page without an instrument
loads none of them. Models and machines are described here, from the shapes, data sheets and reports that
`benchmarks.roofline` computes with. Invariant: the scripts hold formulas and no figure; all figures are data.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from docutils import nodes
from jinja2 import Environment, FileSystemLoader
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.transforms import SphinxTransform

from benchmarks.hardware import DATA_SHEETS
from benchmarks.report import read_value
from benchmarks.roofline import MATRICES, DecodeWork
from course_site.repository import ROOT, read
from shared.checkpoints.shapes import SHAPES
from shared.loading.config_json import parse_config

MARK = re.compile(r"<!--\s*\{\{instrument:(\w+)((?:\s+\w+=[\w.-]+)*)\s*\}\}\s*(.*?)\s*-->", re.DOTALL)
DEMO_MODEL = "smollm2-135m"
DEMO_REPORT = ROOT / "benchmarks/reports/generation-smollm2-135m-cpu-2x-xeon.json"
"""Where the shape of the demo model stands, and the ceilings of the two cores that ran it."""
BITS = {32: "32 (fp32)", 16: "16 (bf16)", 8: "8", 4.125: "4, a scale for 128"}
CONTEXTS = {0: "not counted", 512: "of 512 tokens a row", 4096: "of 4,096 tokens a row"}
ROWS = [1, 2, 3, 4, *(n << power for power in range(1, 9) for n in (3, 4))]
_TEMPLATES = Environment(loader=FileSystemLoader(Path(__file__).parents[1] / "templates"), autoescape=True)


@dataclass(frozen=True)
class Control:
    """A slider over values, with their unit; or a menu of values with their names."""

    name: str
    label: str
    values: Sequence[float | str]
    unit: str = ""
    names: Sequence[str] = ()

    @classmethod
    def menu(cls, name: str, label: str, names: Mapping[Any, str]) -> "Control":
        return cls(name, label, list(names), names=list(names.values()))

    def index(self, value: str) -> int:
        """The position of a value by its text; raises ValueError if there is none."""
        return [each if isinstance(each, str) else f"{each:g}" for each in self.values].index(value)


@dataclass(frozen=True)
class Instrument:
    """Its controls, what is said of its chart and its table, and the data of its scripts."""

    controls: tuple[Control, ...]
    chart: str
    table: str
    data: Mapping[str, Any]
    key: Mapping[str, str] = field(default_factory=dict)
    time: Control | None = None


def roofline(model: str) -> Instrument:
    """Rows, bits of a weight, a machine, keys and values: the least time of a step."""
    known = machines(model)
    bits = {bits: name for bits, name in BITS.items() if any(bits in machine["bits"] for machine in known.values())}
    return Instrument(
        (
            Control("rows", "Rows of a step", ROWS),
            Control.menu("bits", "Bits of a weight", bits),
            Control.menu("machine", "Machine", {name: machine["title"] for name, machine in known.items()}),
            Control.menu("context", "Keys and values", CONTEXTS),
        ),
        "The least time of a step by its rows, both logarithmic: the longer of reading and multiplying. A point marks "
        "the chosen rows; the text below the chart says what the point shows.",
        "Least times by rows",
        {"work": work_of(model), "machines": known},
        key={"roof": "a step", "reading": "reading", "multiplying": "multiplying", "other": "reading at other bits"},
    )


def guesses(model: str) -> Instrument:
    """Acceptance, number and cost of drafts, and requests: the speed-up over plain steps on an H100."""
    return Instrument(
        (
            Control("acceptance", "Drafts accepted", range(0, 101, 5), " %"),
            Control("drafts", "Drafts a step (K)", range(1, 11)),
            Control("cost", "Cost of a draft, in steps", (0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4)),
            Control("requests", "Requests", [n for n in ROWS if n <= 512]),
        ),
        "The speed-up over plain steps by the number of requests, both logarithmic; a line marks 1. A point marks the "
        "chosen number; the text below the chart says what the point shows.",
        "Speed-up by drafts",
        {"work": work_of(model), "machine": machines(model)["h100"], "text": story()},
        time=Control("time", "Time, in plain steps", [n / 2 for n in range(81)]),
    )


KINDS = {"roofline": roofline, "guesses": guesses}


def work_of(model: str) -> dict[str, int]:
    """What a decode step reads and computes: see ``Work`` in ``formulas.js``. The context counts linearly, as no model
    here has windows.
    """
    config = parse_config(read_value(DEMO_REPORT, "model.config") if model == DEMO_MODEL else SHAPES[model], model)
    work = DecodeWork(config, torch.bfloat16)
    matrices = sum(work.parameters[part] for part in MATRICES)
    return {
        "matrices": matrices,
        "others": work.weight_bytes // 2 - matrices,
        "row": work.row_bytes // 2,
        "key": work.kv_bytes_per_token // 2,
        "products": work.matmul_flops,
        "attention": work.attention_flops(1),
    }


def machines(model: str) -> dict[str, dict[str, Any]]:
    """What each machine reads and computes in a second, and the bits that a weight may have there: a data sheet's
    operations are those of 16-bit matrices. The demo model also has the two cores that it was measured on.
    """
    found = {
        name: {
            "title": sheet.title,
            "bytes": sheet.read_bytes_per_second,
            "operations": sheet.matmul_flops_per_second,
            "bits": [bits for bits in BITS if bits <= 16],
        }
        for name, sheet in DATA_SHEETS.items()
    }
    if model == DEMO_MODEL:
        ceilings = read_value(DEMO_REPORT, "results.ceilings")
        found["2x-xeon"] = {
            "title": f"{read_value(DEMO_REPORT, 'machine_title')}, measured",
            "bytes": 1e9 * ceilings["read_gb_per_second"],
            "operations": 1e12 * ceilings["matmul_tflop_per_second"],
            "bits": list(BITS),
        }
    return found


def story() -> list[str]:
    """The tokens of the text that streams: a step each, as the chapter on drafts prints them."""
    line = next(line for line in read("tutorial/phase_11.md").splitlines() if line.startswith("[The][ sun]"))
    return re.findall(r"\[(.*?)\]", line)


def figure(kind: str, settings: Mapping[str, str], question: str) -> str:
    """The HTML of an instrument; raises ExtensionError for a kind, a model or a setting that does not exist."""
    chosen = dict(settings)
    try:
        instrument = KINDS[kind](chosen.pop("model"))
        controls = [
            (each, each.index(chosen.pop(each.name)) if each.name in chosen else 0) for each in instrument.controls
        ]
    except (KeyError, ValueError) as error:
        raise ExtensionError(f"The instrument {kind} with {dict(settings)}: {error}") from None
    if chosen:
        raise ExtensionError(f"The instrument {kind} has no {', '.join(chosen)}.")
    return _TEMPLATES.get_template("instrument.html").render(
        kind=kind,
        question=" ".join(question.split()),
        instrument=instrument,
        controls=controls,
        time=instrument.time and (instrument.time, instrument.time.index("12")),
        data=json.dumps(instrument.data, separators=(",", ":")).replace("<", "\\u003c"),
    )


class Instruments(SphinxTransform):
    """The comments of a chapter that stand for instruments."""

    default_priority = 415  # before comments are removed

    def apply(self, **kwargs: object) -> None:
        kinds = []
        for node in list(self.document.findall(nodes.raw)):
            if (match := MARK.fullmatch(node.astext().strip())) is not None:
                settings = dict(setting.split("=") for setting in match[2].split())
                node.replace_self(nodes.raw("", figure(match[1], settings, match[3]), format="html"))
                kinds.append(match[1])
        if kinds:
            self.env.metadata[self.env.current_document.docname]["instruments"] = kinds


def _add_scripts(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    kinds = app.env.metadata.get(page, {}).get("instruments", [])
    for script in dict.fromkeys(kinds and ["formulas", "instrument", *kinds]):
        app.add_js_file(f"instruments/{script}.js", loading_method="defer")
    if kinds:
        app.add_js_file("elements.js", loading_method="defer", priority=400)  # before the others
        app.add_css_file("instruments/instruments.css")


def register(app: Sphinx) -> None:
    app.add_transform(Instruments)
    app.connect("html-page-context", _add_scripts)

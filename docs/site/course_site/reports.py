"""The reports of `benchmarks/reports` as the site shows them. Introduced in phase 3.

A report is data (JSON), a table (Markdown) and perhaps a chart (PNG). The table is a page of the site; it is given a
title where it has none, the chart, and the way to the data.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from course_site.repository import ROOT

FOLDER = "benchmarks/reports"


@dataclass(frozen=True)
class Reported:
    """One report: its document, and what was measured on what."""

    docname: str
    title: str

    @property
    def data(self) -> Path:
        return ROOT / f"{self.docname}.json"

    @property
    def chart(self) -> Path | None:
        path = ROOT / f"{self.docname}.png"
        return path if path.exists() else None

    def link(self) -> str:
        """A link in Markdown, to the table or, where there is none, to the data."""
        has_table = (ROOT / f"{self.docname}.md").exists()
        return f"[{self.title}](/{self.docname}.{'md' if has_table else 'json'})"

    def image(self) -> str:
        """The chart in Markdown; nothing if there is none."""
        look = "Left, each phase's speed. Right, look at the slopes: the time of a token by the length of its context."
        return f'![{self.title}](/{self.docname}.png "{look}")' if self.chart else ""


def reports() -> list[Reported]:
    """Every report, in order of name."""
    return [_read(path) for path in sorted((ROOT / FOLDER).glob("*.json"))]


def page(docname: str, text: str) -> str:
    """The Markdown of a report's page, made from its table."""
    report = next((report for report in reports() if report.docname == docname), None)
    if report is None:
        return text
    title = "" if text.lstrip().startswith("# ") else f"# {report.title}\n\n"
    data = f"Everything that was measured, with the machine and all settings: [{report.data.name}](/{docname}.json)."
    return f"{title}{text}\n\n{report.image()}\n\n{data}\n"


def _read(path: Path) -> Reported:
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    name = values["name"].replace("-", " ").capitalize()
    model = values["model"].get("name")  # a kernel alone is measured without a model
    return Reported(
        docname=f"{FOLDER}/{path.name.removesuffix('.json')}",
        title=f"{name}: {model} on {values['machine_title']}" if model else f"{name} on {values['machine_title']}",
    )

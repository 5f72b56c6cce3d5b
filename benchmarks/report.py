"""A measurement as a file: one JSON report, and the pictures made from it. Introduced in phase 3.

Documents cite reports by key (``{{report:file.json#results.02.decode_tokens_per_second}}``), so prose cannot go stale.
Invariant: a report by itself shows what was measured and on what: machine, versions, every engine's whole
configuration, the model's shape and revision, seed and flags. It holds no path and no host name.
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine, machine_name, machine_title, slug
from benchmarks.view import View, markdown
from shared.engine.config import EngineConfig
from shared.errors import ConfigError
from shared.loading.resolve import resolve_model

SCHEMA = 1


@dataclass(frozen=True)
class Report:
    """What one benchmark found, as plain JSON values. It describes the machine, so make it while the measurement's
    number of threads is set.
    """

    name: str
    model: dict[str, Any]
    engines: dict[str, dict[str, Any]]
    seed: int
    flags: dict[str, Any]
    results: dict[str, Any]
    device: str = "cpu"
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    machine: dict[str, Any] = field(default_factory=describe_machine)
    machine_name: str = field(init=False)  # for file names
    machine_title: str = field(init=False)  # for people

    def __post_init__(self) -> None:
        object.__setattr__(self, "machine_name", machine_name(self.device))
        object.__setattr__(self, "machine_title", machine_title(self.device))

    @property
    def file_stem(self) -> str:
        """The name of the report's files without extensions: benchmark, model, machine."""
        model = f"-{slug(self.model['name'])}" if self.model else ""
        return f"{slug(self.name)}{model}-{self.machine_name}"

    def to_dict(self) -> dict[str, Any]:
        """The report in the form of the JSON file."""
        content = {"schema": SCHEMA} | dataclasses.asdict(self)
        machine = dict(content.pop("machine"))
        return content | {"versions": machine.pop("versions"), "machine": machine}

    def line(self) -> str:
        """The one JSON line that a benchmark prints last: what ran, where, and the results."""
        head = {"benchmark": self.name, "model": self.model.get("name"), "machine": self.machine_name}
        rest = {"date": self.date, "flags": self.flags, "results": self.results}
        return json.dumps(head | rest, ensure_ascii=False, allow_nan=False)


def write_report(report: Report, folder: str | Path, *, view: View) -> list[Path]:
    """Write the JSON report, and next to it its view as Markdown and PNG; returns the paths, JSON first. Raises
    ConfigError if the folder cannot be written.
    """
    folder = Path(folder)
    paths = [folder / f"{report.file_stem}.{end}" for end in ("json", "md", *(["png"] if view.panels else []))]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(report.to_dict(), indent=2, ensure_ascii=False, allow_nan=False)
        paths[0].write_text(text + "\n", encoding="utf-8")
        paths[1].write_text(markdown(view), encoding="utf-8")
        if view.panels:
            from benchmarks.figure import save_figure  # matplotlib loads slowly

            save_figure(view, paths[2])
    except OSError as error:
        raise ConfigError(
            f"The report cannot be written into {folder} ({error.strerror or error}); name a folder that can be made."
        ) from error
    return paths


def read_value(path: str | Path, key: str) -> Any:
    """The value at a dotted key of a report, such as ``results.02.decode_tokens_per_second``; if names contain dots
    themselves (phase 03.1), the longest match counts. Raises ConfigError that names the existing keys.
    """
    path = Path(path)
    try:
        node = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"The report {path} cannot be read ({error.strerror or error}); check its name.") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not a JSON report ({error}); measure it again.") from error
    rest: str | None = key
    while rest is not None:
        at = {str(i): item for i, item in enumerate(node)} if isinstance(node, list) else node
        at = at if isinstance(at, dict) else {}
        fitting = [name for name in at if f"{rest}.".startswith(f"{name}.")]
        if not fitting:
            where = key.removesuffix(rest).rstrip(".") or "its top level"
            raise ConfigError(f"{path.name} has no key {key!r}; {where} has {', '.join(at) or 'nothing'}.")
        name = max(fitting, key=len)
        node, rest = at[name], rest[len(name) + 1 :] if rest != name else None
    return node


def describe_model(model: str) -> dict[str, Any]:
    """Name, revision, shape and checksum of a model's ``config.json``; the revision is the hub's commit if the folder
    is a snapshot, otherwise None.
    """
    folder = resolve_model(model).resolve()
    is_snapshot = folder.parent.name == "snapshots"
    raw = (folder / "config.json").read_bytes()
    config = {key: value for key, value in json.loads(raw).items() if key != "_name_or_path"}
    return {
        "name": folder.parent.parent.name.removeprefix("models--").replace("--", "/") if is_snapshot else folder.name,
        "revision": folder.name if is_snapshot else None,
        "config_sha256": hashlib.sha256(raw).hexdigest(),
        "config": config,
    }


def engine_settings(config: EngineConfig, model_name: str) -> dict[str, Any]:
    """Every field of an engine's configuration, with names instead of folders for the model and an adapter."""
    adapter = config.adapter and Path(config.adapter).name
    return dataclasses.asdict(config) | {"model": model_name, "adapter": adapter}


def rounded(value: float, digits: int = 4) -> float:
    """Rounded to significant digits: as many as a measurement justifies and a reader can take in."""
    return float(f"{value:.{digits}g}")


def ratio(over: float | None, under: float | None) -> float | None:
    """The quotient, rounded; None if there is none."""
    return rounded(over / under) if over is not None and under else None

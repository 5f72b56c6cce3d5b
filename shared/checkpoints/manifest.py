"""The manifest of a checkpoint folder: its files and their origin. Introduced in phase 1b.

The file list is written last, so a folder whose manifest lists its files is complete. Sizes are compared on every
start, checksums only on request. A folder without a manifest was not written by this project, and `make_checkpoint`
never overwrites it.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MANIFEST_NAME = "infer-manifest.json"


def sha256_of(path: Path) -> str:
    """The file's SHA-256 as 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def begin_manifest(folder: Path, origin: Mapping[str, Any]) -> None:
    """Mark `folder` as incomplete: its manifest names the origin and no files."""
    _write(folder, {"origin": dict(origin), "files": None})


def write_manifest(folder: Path, origin: Mapping[str, Any], *, checksums: bool) -> None:
    """List every file now in `folder`; with `checksums`, also read each one (seconds per gigabyte)."""
    files = {
        path.name: {"bytes": path.stat().st_size} | ({"sha256": sha256_of(path)} if checksums else {})
        for path in sorted(folder.iterdir())
        if path.name != MANIFEST_NAME
    }
    _write(folder, {"origin": dict(origin), "files": files})


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest, or None if there is no readable one."""
    try:
        manifest = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and {"origin", "files"} <= manifest.keys() else None


def is_complete(folder: Path, origin: Mapping[str, Any]) -> bool:
    """Whether `folder` is complete, has this `origin`, and every file has its recorded size."""
    manifest = read_manifest(folder)
    if manifest is None or manifest["origin"] != dict(origin) or not isinstance(manifest["files"], dict):
        return False
    return all(_size(folder / name) == entry["bytes"] for name, entry in manifest["files"].items())


def damaged_files(folder: Path) -> list[str]:
    """Names of listed files that are missing or whose checksum differs; reads every file."""
    manifest = read_manifest(folder)
    if manifest is None or not isinstance(manifest["files"], dict):
        return [MANIFEST_NAME]
    return [
        name
        for name, entry in manifest["files"].items()
        if _size(folder / name) != entry["bytes"] or ("sha256" in entry and sha256_of(folder / name) != entry["sha256"])
    ]


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _write(folder: Path, manifest: Mapping[str, Any]) -> None:
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")

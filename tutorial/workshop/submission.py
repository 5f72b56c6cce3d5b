"""What a learner hands in: the modules with exercises and those of bug hunts, read out of a folder or a zip file.

Taken are only files at the paths that are asked for, whole and as bytes; everything else in a submission is left where
it is. A hunt's folder is a workspace inside the workspace, which may hold nothing else.
Invariant: nothing is unpacked, no symbolic link is followed, and no more than ``MOST_BYTES`` of a file are read. A
submission that is damaged or means harm becomes one with a reason in ``refused`` or ``problems``; reading it raises
nothing.
"""

import contextlib
import os
import re
import stat
import zipfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

MOST_BYTES = 1 << 20
MOST_LEVELS = 3
"""Folders that may lie around the one that holds ``shared``."""
HUNTS = "bugs"
"""The folder of a workspace that holds the bug hunts, each in a folder named by its number."""
_LEVELS_OF_HUNTS = 2
_HOME = "shared"
_HUNT = re.compile(r"\d\d(\.\d+)?b\d+")


@dataclass(frozen=True)
class Submission:
    """One submission: the modules by their path from the root, and why others were not taken."""

    name: str
    files: Mapping[str, bytes] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)
    refused: str = ""


class _RefusedError(Exception):
    """Why a submission, or one file of it, is not taken."""


def read_submission(path: Path, name: str, wanted: Collection[str]) -> Submission:
    """The modules at the paths ``wanted`` in a workspace, a folder around one, or a zip file of either."""
    try:
        return _from_folder(path, name, wanted) if path.is_dir() else _from_zip(path, name, wanted)
    except _RefusedError as reason:
        return Submission(name, refused=str(reason))
    except Exception as error:  # a damaged zip file: whatever its decompressors raise
        return Submission(name, refused=f"cannot be read ({_said(error)})")


def _from_folder(root: Path, name: str, wanted: Collection[str]) -> Submission:
    home = _only(map(_around_hunts, _homes_below(root)))
    files, problems = {}, {}
    for path in wanted:
        try:
            if (content := _read_file(root / home, PurePosixPath(path))) is not None:
                files[path] = content
        except _RefusedError as reason:
            problems[path] = str(reason)
        except OSError as error:
            problems[path] = f"cannot be read ({_said(error)})"
    return Submission(name, files, problems)


def _homes_below(root: Path) -> Iterable[PurePosixPath]:
    """Folders, as paths from ``root``, that hold a folder ``shared``; hidden ones and links are passed over."""
    level = [PurePosixPath()]
    for _ in range(MOST_LEVELS + _LEVELS_OF_HUNTS + 1):
        below = []
        for folder in level:
            names: list[str] = []
            with contextlib.suppress(PermissionError), os.scandir(root / folder) as entries:
                names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
            if _HOME in names:
                yield folder
            below += [folder / inner for inner in names if inner != _HOME and not inner.startswith(".")]
        level = below


def _around_hunts(home: PurePosixPath) -> PurePosixPath:
    """The workspace around a hunt's folder, such as ``workspace/bugs/08b1``; any other folder itself."""
    is_hunt = home.parent.name == HUNTS and _HUNT.fullmatch(home.name)
    return home.parent.parent if is_hunt else home


def _read_file(home: Path, path: PurePosixPath) -> bytes | None:
    """A file's bytes, None where there is none."""
    place = home
    for index, part in enumerate(path.parts, start=1):
        place = place / part
        try:
            mode = place.lstat().st_mode
        except FileNotFoundError:
            return None
        if stat.S_ISLNK(mode):
            raise _RefusedError("is a symbolic link, or lies behind one; links are not followed")
        if not (stat.S_ISREG(mode) if index == len(path.parts) else stat.S_ISDIR(mode)):
            raise _RefusedError("is no regular file")
    with place.open("rb") as source:
        return _checked(source.read(MOST_BYTES + 1))


def _from_zip(file: Path, name: str, wanted: Collection[str]) -> Submission:
    if not zipfile.is_zipfile(file):
        raise _RefusedError("is neither a folder nor a zip file")
    files, problems = {}, {}
    with zipfile.ZipFile(file) as archive:
        members = {_member_path(info): info for info in archive.infolist()}
        homes = {PurePosixPath(*p.parts[:i]) for p in members for i, part in enumerate(p.parts) if part == _HOME}
        home = _only(
            home for home in map(_around_hunts, homes) if not any(part.startswith((".", "__")) for part in home.parts)
        )
        for path in wanted:
            info = members.get(home / path)
            if info is None:
                continue
            try:
                if stat.S_ISLNK(info.external_attr >> 16):
                    raise _RefusedError("is a symbolic link; links are not followed")
                with archive.open(info) as source:
                    files[path] = _checked(source.read(MOST_BYTES + 1))
            except _RefusedError as reason:
                problems[path] = str(reason)
            except Exception as error:
                problems[path] = f"cannot be unpacked ({_said(error)})"
    return Submission(name, files, problems)


def _member_path(info: zipfile.ZipInfo) -> PurePosixPath:
    """Where a member lies; some programs write the separators of Windows."""
    path = PurePosixPath(info.filename.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or (path.parts and path.parts[0].endswith(":")):
        raise _RefusedError(f"refused: its member {info.filename!r} leads out of the zip file")
    return path


def _only(homes: Iterable[PurePosixPath]) -> PurePosixPath:
    """The folder to take: the outermost that holds ``shared``, and rather its ``workspace`` than itself."""
    around: dict[PurePosixPath, PurePosixPath] = {}
    for home in homes:
        base = home.parent if home.name == "workspace" else home
        if base not in around or home != base:
            around[base] = home
    if not around:
        raise _RefusedError("holds no folder `shared`")
    depth = min(len(base.parts) for base in around)
    outermost = sorted(base for base in around if len(base.parts) == depth)
    if len(outermost) > 1:
        names = ", ".join(str(base) for base in outermost[:4])
        raise _RefusedError(f"holds several workspaces ({names}); name each of them")
    return around[outermost[0]]


def _checked(content: bytes) -> bytes:
    if len(content) > MOST_BYTES:
        raise _RefusedError(f"is larger than {MOST_BYTES >> 20} MiB")
    return content


def _said(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__

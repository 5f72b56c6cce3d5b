"""A learner's modules in the place of the reference's, in any program of the course.

With ``INFER_WORKSHOP=1`` each program of the course begins by installing a finder that looks into the workspace first;
``pytest --workshop`` sets the variable. What is not in the workspace stays the reference's. A gap that is left runs the
reference's lines, so that a learner's first function works inside the whole engine; with ``INFER_WORKSHOP_GAPS=raise``,
which pytest sets, it raises ``NotImplementedError`` instead. Invariant: files are compiled from what they say now (no
bytecode is kept), and the text that ran is what ``inspect`` and tracebacks see, Triton's kernels included.
"""

import importlib.util
import linecache
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from shared.errors import ConfigError
from tutorial.workshop.exercises import ROOT
from tutorial.workshop.skeleton import filled

ENABLED = "INFER_WORKSHOP"
FOLDER = "INFER_WORKSPACE"
GAPS = "INFER_WORKSHOP_GAPS"
SAID = "INFER_WORKSHOP_SAID"
"""Set where it need not be said whose code runs."""
_PACKAGE = "shared"


def workspace_folder() -> Path:
    """The learner's folder: ``INFER_WORKSPACE``, or ``workspace`` beside the reference."""
    return Path(os.environ.get(FOLDER) or ROOT / "workspace").expanduser().resolve()


def is_enabled() -> bool:
    """Whether this program is to run the learner's code."""
    return os.environ.get(ENABLED, "0") not in ("", "0")


def install() -> None:
    """Put the workspace's modules over the reference's, for every later import; does nothing a second time."""
    if any(isinstance(finder, WorkspaceFinder) for finder in sys.meta_path):
        return
    finder = WorkspaceFinder(workspace_folder(), raises=os.environ.get(GAPS) == "raise")
    loaded = [name for name in finder.modules() if name in sys.modules]
    if loaded:
        raise ConfigError(f"The workshop cannot replace {', '.join(loaded)}, which this program has already imported.")
    sys.meta_path.insert(0, finder)
    if not os.environ.get(SAID):
        os.environ[SAID] = "1"  # for the processes that this one starts
        print(f"workshop: {finder.summary()}", file=sys.stderr)


class WorkspaceFinder(MetaPathFinder):
    """Finds ``shared`` modules in a workspace.

    Args:
        raises: whether a gap raises; otherwise it runs the reference's lines.
    """

    def __init__(self, workspace: Path, *, raises: bool) -> None:
        self.workspace = workspace
        self.raises = raises

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(_PACKAGE + "."):
            return None
        relative = fullname.replace(".", "/") + ".py"
        file = self.workspace / relative
        if not file.is_file() or not (ROOT / relative).is_file():
            return None
        loader = WorkspaceLoader(fullname, file, ROOT / relative, raises=self.raises)
        return importlib.util.spec_from_file_location(fullname, file, loader=loader)

    def modules(self) -> list[str]:
        """Names of the modules that the workspace replaces."""
        files = sorted((self.workspace / _PACKAGE).rglob("*.py"))
        relatives = [file.relative_to(self.workspace) for file in files]
        return [".".join(path.with_suffix("").parts) for path in relatives if (ROOT / path).is_file()]

    def summary(self) -> str:
        """One line that says whose code will run."""
        from tutorial.workshop.workspace import State, Workspace

        states = Workspace(self.workspace).states()
        yours = [exercise.number for exercise, state in states.items() if state is State.WRITTEN]
        gaps = [exercise.number for exercise, state in states.items() if state is State.GAP]
        if not yours and not gaps:
            if modules := self.modules():  # of a bug hunt, say
                return f"{len(modules)} modules of {self.workspace}, no exercise has been started there"
            return "no exercise has been started, everything is the reference's"
        left = f"; {', '.join(gaps)} still to do{'' if self.raises else ' (the reference runs there)'}" if gaps else ""
        return f"your code for {', '.join(yours) or 'no exercise yet'}{left}"


class WorkspaceLoader(SourceFileLoader):
    """Compiles one workspace file, its gaps filled from the reference unless they are to raise."""

    def __init__(self, fullname: str, file: Path, reference: Path, *, raises: bool) -> None:
        super().__init__(fullname, str(file))
        self.reference = reference
        self.raises = raises

    def get_code(self, fullname: str) -> CodeType:
        try:
            text = Path(self.path).read_text(encoding="utf-8-sig")  # as Python reads a source
            if not self.raises:
                text, _ = filled(text, self.reference.read_text(encoding="utf-8"))
            # Without a time of modification the entry is never checked against the file, which may hold gaps.
            linecache.cache[self.path] = (len(text), None, text.splitlines(keepends=True), self.path)
            return compile(text, self.path, "exec", dont_inherit=True)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self.path} cannot be read ({error}); write it as UTF-8 text.") from None
        except SyntaxError as error:
            raise ConfigError(f"{self.path}, line {error.lineno}: {error.msg}.") from None
        except ValueError as error:  # a null byte
            raise ConfigError(f"{self.path} cannot be compiled: {error}.") from None

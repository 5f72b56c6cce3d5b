"""Where a page's code runs: its own home folder, and an environment that does not depend on who runs the checker.

Both a page's run fences and its console sessions live here. Invariant: nothing that a page does reaches the
learner's home or workspace, the network through our own loaders, or the GPU; and no path of the machine reaches a page.

- ``HOME`` is a temporary folder of the page, which run fences also have as their working directory.
- ``INFER_WORKSPACE`` is a folder in it, shown as ``workspace``; the workshop itself is off, other settings are unset.
- Caches stay where they are, so that fetched models are found; hubs are offline; there are 100 columns, no colours and
  no CUDA device.
"""

import os
import re
import shutil
import site
import sys
import tempfile
from pathlib import Path

from shared.checkpoints.demo import cache_folder

TIME_LIMIT = 500
"""Seconds that one command or one fence may take: none takes a tenth of them, so only what never ends does."""
_FOREIGN = re.compile(r"INFER_|PYTEST_|PYTHON|CUDA_VISIBLE|NO_COLOR|FORCE_COLOR|TTY_|COLUMNS$|LINES$|LC_|LANG")


class Surroundings:
    """The surroundings of one page. Close them when the page is done.

    Attributes:
        root: the repository's root, where commands run.
        home: the page's own folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.home = Path(tempfile.mkdtemp(prefix="chapter-")).resolve()
        real_home = Path.home()
        names = {
            Path(tempfile.gettempdir()).resolve(): "/tmp",
            real_home: "~",
            real_home.resolve(): "~",
            cache_folder(): "~/.cache/infer",
            cache_folder().resolve(): "~/.cache/infer",
            self.root: "~/infer",
            self.home: "~",
            self.home / "workspace": "workspace",
        }
        # The longest first, so that a folder inside another is found.
        self._names = [
            (str(path), names[path]) for path in sorted(names, key=lambda path: -len(str(path))) if path != path.parent
        ]

    def environment(self) -> dict[str, str]:
        """The variables of a process that runs what the page shows."""
        kept = {name: value for name, value in os.environ.items() if not _FOREIGN.match(name)}
        cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        return kept | {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
            "HOME": str(self.home),
            "XDG_CACHE_HOME": cache,
            "INFER_CACHE": str(cache_folder()),
            "INFER_STEP_COSTS": str(self.home / "step-costs"),
            "INFER_WORKSPACE": str(self.home / "workspace"),
            "PYTHONPATH": os.pathsep.join([str(self.root), str(self.home)]),
            "PYTHONUSERBASE": site.getuserbase(),
            "PYTHONUTF8": "1",
            "LANG": "C.UTF-8",
            "COLUMNS": "100",
            "NO_COLOR": "1",
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }

    def portable(self, text: str) -> str:
        """The text without paths of this machine."""
        for path, name in self._names:
            text = re.sub(rf"(?<![\w.~-]){re.escape(path)}(?![\w.-])", name, text)
        return text

    def close(self) -> None:
        """Remove the page's folder."""
        shutil.rmtree(self.home, ignore_errors=True)

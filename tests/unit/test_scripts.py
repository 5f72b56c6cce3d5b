"""The JavaScript of all pages: typed through JSDoc, nothing in it unused or unreachable, and light.

The checker is TypeScript's compiler, which writes nothing here. `.ci/run` installs the version below.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shared.server import pages
from shared.tracing import timeline_page
from shared.tracing.inline_page import PAGE
from shared.tracing.steps import page as stepper

ROOT = Path(__file__).parents[2]
TYPESCRIPT = "5.9.3"
BESIDE = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
STATIC = ROOT / "docs/site/static"
INSTRUMENTS = [STATIC / f"instruments/{name}.js" for name in ("formulas", "instrument", "roofline", "guesses")]
SERVER = [path for path in (*pages.SHARED, *sorted(pages.FOLDER.iterdir())) if path.suffix == ".js"]
PAGES = {
    "stepper": [PAGE / "elements.js", *(stepper.FOLDER / name for name in stepper.SCRIPTS)],
    "trace": [PAGE / name for name in ("elements.js", *timeline_page.SCRIPTS)],
    "server": SERVER,
    "site": [
        PAGE / "elements.js",
        *INSTRUMENTS,
        STATIC / "course.js",
        STATIC / "source.js",
        STATIC.parent / "scorer.js",
    ],
}
"""What each page loads: classic scripts share their names. Each set of pages costs the checker three seconds."""
CHECKS = (
    "--noEmit --allowJs --checkJs --strict --skipLibCheck --target es2022 --lib es2022,dom,dom.iterable "
    "--noUnusedLocals --noUnusedParameters --noImplicitReturns --noFallthroughCasesInSwitch "
    "--allowUnreachableCode false --pretty false"
)
FAULTS = {
    "TS7006": "const name = (text) => text;",
    "TS6133": "{ const unused = 1; }",
    "TS7027": "const one = () => { return 1; one(); };",
    "TS7029": "switch (Date.now()) { case 1: Date.now(); case 2: break; }",
    "TS7030": "const some = () => { if (Date.now() > 1) return 1; };",
    "TS2304": "missing();",
    "TS2322": '/** @type {number} */ const count = "1";',
    "TS2531": 'document.getElementById("x").remove();',
}


def errors(scripts: list[Path]) -> str:
    """What the checker says of the scripts of one page."""
    checker = shutil.which("tsc", path=BESIDE)
    if checker is None:
        pytest.skip(f"TypeScript is not installed; npm install --global --prefix .venv typescript@{TYPESCRIPT}")
    call = [checker, *CHECKS.split(), *map(str, scripts)]
    found = subprocess.run(call, capture_output=True, text=True, env=os.environ | {"PATH": BESIDE}, cwd=ROOT)
    assert found.returncode in (0, 2), found.stdout + found.stderr
    return found.stdout


@pytest.mark.parametrize("page", PAGES)
def test_the_checker_finds_nothing(page: str) -> None:
    assert errors(PAGES[page]) == ""


def test_the_checker_finds_faults(tmp_path: Path) -> None:
    script = tmp_path / "faults.js"
    script.write_text("\n".join(FAULTS.values()), encoding="utf-8")
    said = errors([script])
    assert [line for line, code in enumerate(FAULTS, 1) if f"faults.js({line}," not in said or code not in said] == []


def test_every_script_belongs_to_a_page() -> None:
    folders = ("shared", "docs", "tutorial", "benchmarks", "phases", "tests")
    here = {path for each in folders for path in (ROOT / each).rglob("*.js")}
    assert here == {path for scripts in PAGES.values() for path in scripts}


def test_continuous_integration_installs_the_checker() -> None:
    assert f"typescript@{TYPESCRIPT}" in (ROOT / ".ci/run").read_text(encoding="utf-8")


def test_the_scripts_of_the_pages_stay_light() -> None:
    def lines(scripts: list[Path]) -> int:
        return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in scripts)

    elements, *trace = PAGES["trace"]  # the elements are those of all pages
    parts = [lines([elements]), lines(PAGES["stepper"][1:]), lines(trace), lines(INSTRUMENTS)]
    assert all(part <= most for part, most in zip(parts, (50, 1200, 800, 400), strict=True)), parts
    assert sum(parts) <= 2500

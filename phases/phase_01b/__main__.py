"""The command line of this phase: ``python -m`` with the package's name; see ``--help``."""

from shared.cli.course.phase import run_phase

if __name__ == "__main__":
    run_phase(__package__)

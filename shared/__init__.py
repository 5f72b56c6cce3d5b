"""The library of the course. Every component lives here once; each module was introduced by exactly one phase."""

import os

if os.environ.get("INFER_WORKSHOP", "0") not in ("", "0"):
    from tutorial.workshop.overlay import install

    install()

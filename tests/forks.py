"""Processes that are forked from one that has imported the engine and the server once.

A process that is started in the usual way imports them for five seconds.
"""

import multiprocessing

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "shared.cli",
        "shared.server.app",
        "shared.server.process",
        "shared.server.engine.process",
        "shared.engine.warm_up",
        "phases.phase_12.engine",
        "tests.unit.server.echo",
    ]
)

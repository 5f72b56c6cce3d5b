"""Measurements: harnesses that print a table and one JSON line, their workloads, and the reports that the docs cite.

The modules here are what a command starts, and what all of them share. ``device/`` times a GPU; ``kernels/``,
``generation/`` and ``serving/`` hold the parts of the benchmark of that name; ``workloads/`` says what is asked of an
engine; ``reports/`` keeps what was measured together with the machine it was measured on.
"""

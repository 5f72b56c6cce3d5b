"""Measurements: harnesses that print a table and one JSON line, their workloads, and the reports that the docs cite.

The modules here are what a command starts, and what all of them share. ``kernels/`` and ``serving/`` hold the parts of
the benchmark of that name, ``workloads/`` the requests that an engine is sent, ``reports/`` what was measured and the
machine it was measured on.
"""

"""Measurements: harnesses that print a table and one JSON line, their workloads, and the reports that the docs cite.

``kernels/`` and ``serving/`` hold the parts of the benchmark of that name, ``workloads/`` the requests of an engine.
"""

"""Measurements: harnesses that print a table and one JSON line, their workloads, and the reports that the docs cite.

``reports/`` keeps what was measured together with the machine it was measured on; ``workloads/`` what was asked of it.
"""

"""Measurements that print a table and one JSON line, their workloads, and the reports that the docs cite."""

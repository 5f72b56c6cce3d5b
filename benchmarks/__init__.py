"""Measurements that print a table and one JSON line, their workloads, and the reports that the docs cite.

A new question is first a row in an existing table: an experiment of :mod:`benchmarks.serving.experiments`, a workload
of :mod:`benchmarks.workloads.serving`, a configuration of :mod:`benchmarks.run_matrix`, an option of
:mod:`benchmarks.options`, or a case of :mod:`benchmarks.kernels`. A benchmark that fits no table is a module with
``measure``, whose arguments are its options, and ``view``; :func:`benchmarks.command.run` runs it. It takes its model
and its report from :class:`benchmarks.setup.Setup`, interleaves what it compares (:func:`benchmarks.timing.in_turns`),
and times requests that decode with :class:`benchmarks.decoding.Decoding`.
"""

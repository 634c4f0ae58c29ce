"""Benchmarks for the developers of this package; `python -m benchmarks.reducer --help` and so on.

They use the harness of `dataparallel bench`. Run them from the root of the repository.
"""

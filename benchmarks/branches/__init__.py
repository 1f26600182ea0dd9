"""Benchmarks of the tools over the versions of a run."""

"""Benchmarks of where a run's compute goes: thinking tokens, completions, steps."""

"""Benchmarks of learning from live users."""

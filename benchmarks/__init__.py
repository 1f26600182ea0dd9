"""Benchmarks of deltawire and of other systems' formats; run from a checkout, not in the wheel."""

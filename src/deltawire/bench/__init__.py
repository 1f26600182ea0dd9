"""Measuring the codec: pairs of weights to measure on, other systems' formats, and the table."""

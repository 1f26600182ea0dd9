"""Measurements of the clients that publish to a run or read from it."""

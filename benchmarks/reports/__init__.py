"""Runs each benchmark and prints its figures, one module each."""

"""Turns answers and feedback into groups that a trainer consumes."""

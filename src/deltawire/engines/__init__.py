"""Samples from a run's weights, and switches to new versions while sampling."""

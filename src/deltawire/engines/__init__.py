"""Engines that sample from a run's weights, and take up new versions while they do."""

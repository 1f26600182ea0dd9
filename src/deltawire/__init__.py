"""Reinforcement-learning post-training of language models over an object-store bucket."""

__version__ = "0.1.0"

"""Encodes tensors and commits versions: the writing side."""

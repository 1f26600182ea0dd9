"""The writing side: encodes tensors and commits versions."""

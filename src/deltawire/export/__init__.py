"""Defines which tensors a trainer publishes, and how they are read back."""

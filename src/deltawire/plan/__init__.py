"""Plans training runs without hardware: which layout of a model fits, and what it needs.

`resolve_training_profile` is the entry point. Nothing here imports torch.
"""

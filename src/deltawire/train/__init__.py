"""The trainer's machinery: forward passes, master weights, checkpoints, the warm start."""

"""The trainer process: bootstrap, the training loop, resume and verification."""

"""The reference process: scores finished groups with a frozen model, for the trainer to read."""

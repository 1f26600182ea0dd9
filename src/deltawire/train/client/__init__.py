"""Trains and samples with the verbs of Tinker's SDK, on a run in a bucket."""

"""Serves Tinker's SDK from a run in a bucket: its unmodified client trains and samples there."""

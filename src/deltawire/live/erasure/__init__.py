"""Deletes what was stored of a user, and tells what was trained on it."""

"""Fetches, verifies and applies versions: the reading side."""

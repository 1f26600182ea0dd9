"""Renders a run for people: the live screen, the closing summary and the report."""

"""Maintains a run in the background: retention, relays and fsck."""

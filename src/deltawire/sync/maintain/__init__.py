"""Background upkeep of a run: compaction, retention, relays and fsck."""

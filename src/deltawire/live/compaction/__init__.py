"""Compaction of what is stored of live users: many small segments become few large ones."""

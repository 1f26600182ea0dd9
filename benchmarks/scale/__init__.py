"""Measurements of ``deltawire bench scale``: costs that grow with ranks, readers and versions."""

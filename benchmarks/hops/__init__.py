"""Measurements of ``deltawire bench hops``: the rates that ``deltawire plan`` computes with."""

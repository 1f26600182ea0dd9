"""For tests, deltawire's and others': a store suite, a store that fails, and a tiny run.

``deltawire.testing.store_suite`` needs pytest; the rest needs nothing that deltawire does not.
"""

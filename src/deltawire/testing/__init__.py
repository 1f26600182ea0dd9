"""Test tools for deltawire and for stores of others: a store suite, a failing store, a tiny run.

``deltawire.testing.store_suite`` needs pytest; the rest needs only what deltawire needs.
"""

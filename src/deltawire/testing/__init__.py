"""Test tools for deltawire and for stores of others: a store suite, a failing store, a tiny run.

All of it needs only what deltawire needs; servers for tests (`deltawire.testing.s3_server`) need
their packages.
"""

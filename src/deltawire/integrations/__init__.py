"""Attests engines in the loops of other frameworks: one line each, no bucket and no run of ours.

Each module has ``verify``, which wraps the framework's own update of its engines: after each update
every engine is asked what it holds, and that is compared with what the trainer held
(docs/ATTEST.md). `deltawire.integrations.checking` says what happens then.
"""

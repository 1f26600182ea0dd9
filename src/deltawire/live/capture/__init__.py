"""Keeps parts of served answers: consent, pseudonyms, redaction, spool, upload."""

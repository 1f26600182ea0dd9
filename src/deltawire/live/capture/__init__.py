"""Keeps served answers: consent, pseudonyms, redaction, spool, upload."""

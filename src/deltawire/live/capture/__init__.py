"""What is kept of served answers: consent, pseudonyms, redaction, spool, upload."""

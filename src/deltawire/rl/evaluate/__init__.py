"""Evaluation on held-out tasks, the audit of consumed groups, and attestation of workers."""

"""Benchmarks of attestation: bugs that it names, false alarms and costs; see docs/ATTEST.md."""

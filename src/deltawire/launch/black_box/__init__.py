"""Attests an endpoint by its log-probabilities only ([docs](docs/ATTEST.md))."""

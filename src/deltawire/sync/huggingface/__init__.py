"""Publishes and checks out Hugging Face checkpoint directories."""

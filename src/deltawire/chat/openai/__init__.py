"""The OpenAI-compatible endpoint: requests, answers, streaming, and recorded conversations."""

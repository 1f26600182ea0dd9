"""Policies of endpoints for tests, by the options that tests vary."""

from deltawire.chat.openai.endpoint import Policy
from deltawire.chat.requests import RequestSettings

OF_POLICY = ("turns", "model", "budget", "verifier")


def policy_of(*, max_tokens, capacity, temperature=None, **options):
    """A policy; without a temperature clients choose how to sample."""
    own = {name: options.pop(name) for name in OF_POLICY if name in options}
    settings = RequestSettings(
        max_tokens, capacity, 1.0 if temperature is None else temperature, **options
    )
    return Policy(settings, client_samples=temperature is None, **own)

"""Pseudonyms: names of users and conversations as keyed hashes.

Without the key it cannot be told whether two deployments serve the same user, or look up a user's
name among the pseudonyms. Every gateway of a deployment has the same key.
"""

from __future__ import annotations

from blake3 import blake3

_USERS = "deltawire 2026 pseudonyms of live users"
_CONVERSATIONS = "deltawire 2026 conversations of live users"


class Pseudonyms:
    """Hashes names with keys derived from a deployment's secret.

    Example::

        user = Pseudonyms(secret).user("alice@example.com")
    """

    def __init__(self, secret: bytes) -> None:
        self._users = blake3(secret, derive_key_context=_USERS).digest()
        self._conversations = blake3(secret, derive_key_context=_CONVERSATIONS).digest()

    def user(self, name: str) -> str:
        """Returns a user's pseudonym, 32 hexadecimal digits; empty for an empty name."""
        data = name.encode("utf-8", "surrogatepass")
        return blake3(data, key=self._users).hexdigest()[:32] if name else ""

    def conversation(self, user: str, name: str) -> str:
        """Returns the pseudonym of a conversation of the user with this pseudonym."""
        data = f"{user}\0{name}".encode("utf-8", "surrogatepass")
        return blake3(data, key=self._conversations).hexdigest()[:32]

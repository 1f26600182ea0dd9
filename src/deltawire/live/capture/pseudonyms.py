"""Pseudonyms: names of users and conversations as keyed hashes.

Without the secret it cannot be told whether two deployments serve the same user, or look up a
user's name among the pseudonyms. Every gateway of a deployment has the same secret.

A user who was forgotten and asks to be stored again gets another pseudonym, the next ``life``: what
still waits somewhere under the earlier one stays forgotten.
"""

from __future__ import annotations

from collections.abc import Container

from blake3 import blake3

_USERS = "deltawire 2026 pseudonyms of live users"
_LATER_LIVES = "deltawire 2026 pseudonyms of readmitted live users"
_CONVERSATIONS = "deltawire 2026 conversations of live users"


class Pseudonyms:
    """Hashes names with keys derived from one generation of a deployment's secret.

    Example::

        user = Pseudonyms(secret).user("alice@example.com")
    """

    def __init__(self, secret: bytes) -> None:
        self._users = blake3(secret, derive_key_context=_USERS).digest()
        self._later_lives = blake3(secret, derive_key_context=_LATER_LIVES).digest()
        self._conversations = blake3(secret, derive_key_context=_CONVERSATIONS).digest()

    def user(self, name: str, life: int = 0) -> str:
        """Returns a user's pseudonym, 32 hexadecimal digits; empty for an empty name."""
        if not name:
            return ""
        text, key = (f"{life}\0{name}", self._later_lives) if life else (name, self._users)
        return blake3(text.encode("utf-8", "surrogatepass"), key=key).hexdigest()[:32]

    def lives(self, name: str, readmitted: Container[str]) -> list[str]:
        """Returns all pseudonyms that a user had, the present one last."""
        found = [self.user(name)]
        while name and found[-1] in readmitted:
            found.append(self.user(name, len(found)))
        return found

    def conversation(self, user: str, name: str) -> str:
        """Returns the pseudonym of a conversation of the user with this pseudonym."""
        data = f"{user}\0{name}".encode("utf-8", "surrogatepass")
        return blake3(data, key=self._conversations).hexdigest()[:32]

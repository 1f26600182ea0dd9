"""What the fleet asks of a replica, whatever serves in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from deltawire.serving.contract import CacheReset


@dataclass(frozen=True)
class Held:
    """What a replica says of itself: the version that it serves, and the digest of the bits that
    it attested for it, 32 hexadecimal digits."""

    version: int
    digest: str


class Replica(Protocol):
    """One engine, of however many ranks, behind one base URL.

    Both calls raise `RetryError` if the replica does not answer, and another `DeltawireError` if
    it answers that it cannot.
    """

    @property
    def name(self) -> str:
        """Unique in its fleet."""
        ...

    @property
    def base_url(self) -> str:
        """Where its OpenAI-compatible endpoints are, without ``/v1``."""
        ...

    async def held(self) -> Held:
        """What it serves now."""
        ...

    async def load(self, version: int, *, cache: CacheReset) -> Held:
        """Prepare ``version`` while serving, swap, attest; returns once that is so. What is in
        flight goes the replica's own way. An error leaves it at the version it served."""
        ...

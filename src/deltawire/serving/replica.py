"""The interface of a replica: one engine that serves behind one URL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from deltawire.serving.contract import CacheReset


@dataclass(frozen=True)
class HeldVersion:
    """A replica's own statement: the version that it serves, the digest that it attested, as 32
    hexadecimal digits, and which engine it is, if it says so."""

    version: int
    digest: str
    engine: str = ""


class Replica(Protocol):
    """One engine, of any number of ranks, behind one base URL.

    Both calls raise `RetryError` if the replica does not answer, and another `DeltawireError` if
    it answers that it cannot.
    """

    @property
    def name(self) -> str:
        """A name that is unique among the replicas."""
        ...

    @property
    def base_url(self) -> str:
        """The URL of its OpenAI-compatible endpoints, without ``/v1``."""
        ...

    @property
    def model(self) -> str:
        """Its name for the model, where the operator states it; empty to ask it."""
        ...

    async def held(self) -> HeldVersion:
        """Returns what it serves now."""
        ...

    async def load(self, version: int, *, cache: CacheReset) -> HeldVersion:
        """Prepares ``version`` while serving, swaps and attests, then returns. The replica decides
        about requests in flight. After an error it still serves its old version."""
        ...

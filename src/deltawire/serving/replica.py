"""The interface of a replica: one engine that serves behind one URL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deltawire.errors import BugError
from deltawire.serving.contract import CacheReset


@dataclass(frozen=True)
class HeldVersion:
    """A replica's own statement: the version that it serves, the digest that it attested, as 32
    hexadecimal digits, and which engine it is, if it says so."""

    version: int
    digest: str
    engine: str = ""


class Replica:
    """One engine, of any number of ranks, behind one base URL.

    ``name`` is unique among the replicas, ``base_url`` is without ``/v1``. ``model`` is its name
    for the model, where the operator states it; empty to ask it. ``upstream`` is the name of
    another provider's model; empty for the run's own. ``headers`` authorize a call, and
    ``poll_every_s`` is how often it is asked what it holds, 0 for the usual.

    Both calls raise `RetryError` if the replica does not answer, and another `DeltawireError` if
    it answers that it cannot.
    """

    name: str
    base_url: str
    model: str = ""
    upstream: str = ""
    headers: Mapping[str, str] = {}
    poll_every_s: float = 0.0

    def url(self, path: str) -> str:
        """Returns the URL of a path such as ``/v1/chat/completions``."""
        return f"{self.base_url}{path}"

    async def held(self) -> HeldVersion:
        """Returns what it serves now."""
        raise NotImplementedError

    async def load(self, version: int, *, cache: CacheReset) -> HeldVersion:
        """Prepares ``version`` while serving, swaps and attests, then returns. The replica decides
        about requests in flight. After an error it still serves its old version."""
        raise BugError(f"replica {self.name} cannot load version {version} ({cache})")

"""Typed requests and answers of the hosted services' hot-load contract.

The shapes are Fireworks' (docs.fireworks.ai, "RL rollout integration" and "RL rollout debugging"),
which other providers have adopted. Requests are validated completely; unknown members are refused
by name rather than ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from deltawire.errors import InputError
from deltawire.wire.objects import prepared

MAX_REQUEST_BYTES = 1 << 16

Identity = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,256}\Z")]
"""A snapshot's name: one segment of a path."""

CacheReset = Literal["all", "new_session", "none"]
Stage = Literal["ready", "pending", "loading", "error"]


class Incremental(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Metadata that the hosted services need about a delta. Here each replica plans its own route
    from what it holds, so only ``previous_snapshot_identity`` is checked against the run."""

    previous_snapshot_identity: Identity
    compression_format: Annotated[str, Meta(max_length=64)] = ""
    checksum_format: Annotated[str, Meta(max_length=64)] = ""


class Validation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Configuration members that may differ between snapshots. A run has a single configuration,
    so this has no effect."""

    extra_fields_ignore: Annotated[list[str], Meta(max_length=1024)] = []


class HotLoad(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``POST /hot_load/v1/models/hot_load``.

    ``reset_prompt_cache`` may be a boolean, as the services' own client sends it: true is ``all``.
    """

    identity: Identity
    incremental_snapshot_metadata: Incremental | None = None
    reset_prompt_cache: CacheReset | bool = "all"
    validation: Validation = Validation()

    @property
    def cache(self) -> CacheReset:
        """Which cached prompts to drop."""
        if isinstance(self.reset_prompt_cache, bool):
            return "all" if self.reset_prompt_cache else "none"
        return self.reset_prompt_cache


class LoadingState(msgspec.Struct, frozen=True):
    """The state of a replica."""

    stage: Stage
    target_snapshot_identity: str | None = None
    message: str = ""


class ReplicaState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one replica. ``readiness``: it holds ``current_snapshot_identity`` by its own
    attestation, and that is the snapshot requested last."""

    name: str
    readiness: bool
    current_snapshot_identity: str | None
    loading_state: LoadingState
    loaded_adapters: list[Any] = []
    digest: str = ""
    upstream: str = ""
    """The name of another provider's model, of which nothing is attested; empty for the run's."""


class ReplicaSetState(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /hot_load/v1/models/hot_load``."""

    replicas: list[ReplicaState]


class LedgerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One requested snapshot. Times are seconds since 1970."""

    identity: str
    kind: Literal["full", "delta"]
    version: int
    asked_at: float
    ready_at: dict[str, float] = {}
    errors: dict[str, str] = {}


def read_request(data: bytes) -> HotLoad:
    """Parses a request's body; raises `InputError` naming the invalid member."""
    if len(data) > MAX_REQUEST_BYTES:
        raise InputError(f"the request has {len(data)} bytes; the limit is {MAX_REQUEST_BYTES}")
    try:
        return msgspec.json.decode(data, type=prepared(HotLoad))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        reason = str(error) or type(error).__name__
        raise InputError(f"not a hot-load request: {reason.replace('`$.', '`')}") from error

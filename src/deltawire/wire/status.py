"""``trainer.json`` and ``fleet/``: who is alive, at which version, with which credits."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from deltawire.wire.manifest import Index
from deltawire.wire.objects import FORMAT

MAX_STATUS_BYTES = 4 << 20

Phase = Literal["starting", "training", "stopped", "finished"]
WorkerPhase = Literal["starting", "sampling", "stopped", "finished"]


class TrainerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer's own status, replaced whole at every change.

    ``version`` is committed. ``credits`` counts, for each worker, the groups it may have started
    since the run began. ``finished`` means that ``version`` is the last one.
    """

    format: int = FORMAT
    phase: Phase
    version: Index
    digest: str
    epoch: Index
    credits: Annotated[dict[str, Index], Meta(max_length=1 << 16)]
    at: float


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's status. ``digest`` is that of its serving weights, recomputed from them when
    ``attested``; ``stored`` counts the groups it has put, ``nonce`` tells its processes apart."""

    format: int = FORMAT
    worker: Annotated[str, Meta(max_length=64)]
    nonce: Annotated[str, Meta(max_length=64)]
    phase: WorkerPhase
    version: Index
    digest: Annotated[str, Meta(max_length=32)]
    attested: bool
    lag: Index
    stored: Index
    supervised: bool
    host: Annotated[str, Meta(max_length=256)]
    pid: int
    started_at: float
    at: float

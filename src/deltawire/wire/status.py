"""``trainer.json``, ``fleet/`` and ``pulses/``: who is alive, at which version, with which credits,
and whether its work goes on."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from deltawire.wire.manifest import Index
from deltawire.wire.objects import FORMAT

MAX_STATUS_BYTES = 4 << 20

Phase = Literal["starting", "training", "stopped", "finished"]
WorkerPhase = Literal["starting", "sampling", "stopped", "finished"]
_Seconds = Annotated[float, Meta(ge=0, le=1e9)]


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
    ``attested``; ``stored`` counts the groups it has put, ``nonce`` tells its processes apart.
    ``stuck`` is said of a worker by itself: its heartbeat goes on and its serving loop does not."""

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
    stuck: bool = False


class Pulse(msgspec.Struct, frozen=True, kw_only=True):
    """That a process lives, and that its work goes on, written by a thread of its own.

    The main thread marks its progress; ``quiet_s`` is how long ago it last did, by the process's
    own clock, and ``allowed_s`` how long what it is ``doing`` may take. ``tenure`` counts the
    processes that had this name: one that finds a higher tenure than its own has been replaced.
    """

    format: int = FORMAT
    process: Annotated[str, Meta(max_length=64)]
    role: Annotated[str, Meta(max_length=32)]
    nonce: Annotated[str, Meta(max_length=64)]
    tenure: Index
    supervised: bool
    host: Annotated[str, Meta(max_length=256)]
    pid: int
    started_at: float
    at: float
    beat: Index
    doing: Annotated[str, Meta(max_length=64)]
    quiet_s: _Seconds
    allowed_s: _Seconds
    ended: bool = False
    achieved: Index = 0
    """Pieces of work finished by this process: versions, groups, evaluations."""

    @property
    def stuck(self) -> bool:
        """Whether it marked no progress for longer than what it does may take."""
        return not self.ended and self.quiet_s > self.allowed_s

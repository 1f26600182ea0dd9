"""Defines the status objects: ``trainer.json``, and one heartbeat per process under
``heartbeats/``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from deltawire.builds import MAX_BUILD
from deltawire.estimates import BudgetSetting
from deltawire.wire.objects import FORMAT
from deltawire.wire.payload import Index

MAX_STATUS_BYTES = 4 << 20
MAX_ALARM = 1024
MAX_DETAIL = 256
MAX_INCIDENTS = 256
MAX_READERS = 256
"""The most readers in the report of one host."""

Phase = Literal["starting", "training", "stopped", "finished"]
WorkerPhase = Literal["starting", "sampling", "stopped", "finished"]
_Seconds = Annotated[float, Meta(ge=0, le=1e9)]
_Time = Annotated[float, Meta(ge=0, le=1e12)]
_Name = Annotated[str, Meta(max_length=64)]
_Size = Annotated[int, Meta(ge=1, le=4096)]
_Part = Annotated[int, Meta(ge=0, le=4096)]


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """Misbehavior of a worker, or of someone who writes in its name.

    ``kind`` names it, ``count`` says how often it happened, and ``detail`` describes the last
    occurrence. Groups of a ``quarantined`` worker are no longer read or trained on.
    """

    worker: _Name
    kind: Annotated[str, Meta(max_length=32)]
    count: Index
    detail: Annotated[str, Meta(max_length=MAX_DETAIL)] = ""
    quarantined: bool = False


class Challenge(msgspec.Struct, frozen=True, kw_only=True):
    """The object at ``challenges/<worker>.json``: the secret from which the nonces of a worker's
    groups are derived. Only the trainer and this worker need to read it.
    """

    format: int = FORMAT
    worker: _Name
    secret: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]


class Draws(msgspec.Struct, frozen=True, kw_only=True):
    """The tasks of a worker under one lease: its group ``numbers[i]`` has the task at
    ``positions[i]`` of the run's order. Group numbers from ``below`` on have no task yet.
    With allocation, ``sizes[i]`` is its number of completions and ``parts[i]`` its number within
    the prompt: 0 for a pilot, more for fills. Without, both are empty: ``rollout.group_size``. A
    controller that moves completions states sizes only.
    """

    lease: Index
    below: Index = 0
    numbers: Annotated[list[Index], Meta(max_length=1 << 16)] = []
    positions: Annotated[list[Index], Meta(max_length=1 << 16)] = []
    sizes: Annotated[list[_Size], Meta(max_length=1 << 16)] = []
    parts: Annotated[list[_Part], Meta(max_length=1 << 16)] = []


class TrainerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer's status, replaced as a whole at every change.

    ``version`` is committed. ``credits`` counts, for each worker, the groups that it may have
    started since the run began. ``finished`` means that ``version`` is the last one. ``incidents``
    lists misbehavior of workers that the trainer detected; they survive its restarts.
    ``self_attested`` names the facts that the trainer accepts from workers without recomputing
    them. ``settings`` are the values, by dotted key, that differ from the configuration in
    ``run.json``. ``draws`` are the tasks assigned to workers, by worker and lease; without it each
    worker draws from a separate stream. All positions below ``next_draw`` were assigned; those in
    ``returned`` are free again. ``budget`` is the controller's setting for groups that start now.
    """

    format: int = FORMAT
    phase: Phase
    version: Index
    digest: str
    epoch: Index
    credits: Annotated[dict[str, Index], Meta(max_length=1 << 16)]
    at: float
    incidents: Annotated[list[Incident], Meta(max_length=MAX_INCIDENTS)] = []
    self_attested: Annotated[
        list[Annotated[str, Meta(max_length=MAX_DETAIL)]], Meta(max_length=16)
    ] = []
    settings: Annotated[dict[str, Any], Meta(max_length=1024)] = {}
    draws: Annotated[dict[str, list[Draws]], Meta(max_length=1 << 16)] | None = None
    next_draw: Index = 0
    returned: Annotated[list[Index], Meta(max_length=1 << 20)] = []
    budget: BudgetSetting | None = None


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a heartbeat that only workers have.

    ``digest`` is the digest of the serving weights; it was recomputed from the weights themselves
    if ``attested``. ``lag`` is the newest version minus the one held. ``stored`` is the sequence
    number of the worker's next group, and ``first`` that number when the lease began (None:
    unknown). ``learns`` marks a worker that makes its groups of users' answers, and samples
    nothing, and ``waits`` says why it has stored no group for a while. ``alarm`` explains why a
    newer manifest could not be read; empty if all could. ``episodes`` have ended and ``tokens``
    were drawn since the process started, those of groups that are not stored yet among them.
    """

    phase: WorkerPhase
    version: Index
    digest: Annotated[str, Meta(max_length=32)]
    attested: bool = False
    lag: Index = 0
    stored: Index = 0
    first: Index | None = None
    learns: bool = False
    waits: Annotated[str, Meta(max_length=MAX_ALARM)] = ""
    alarm: Annotated[str, Meta(max_length=MAX_ALARM)] = ""
    episodes: Index = 0
    tokens: Index = 0


class StoreTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a process's requests to all its stores since it started, repetitions included.

    The stores refused ``refused`` because there were too many. Of the blobs that the host's readers
    share, ``cache_hits`` were found and ``cache_misses`` fetched. ``anchors`` were stored, and
    ``pruned`` versions deleted.
    """

    requests: Index = 0
    retries: Index = 0
    refused: Index = 0
    read_bytes: Index = 0
    written_bytes: Index = 0
    cache_hits: Index = 0
    cache_misses: Index = 0
    anchors: Index = 0
    pruned: Index = 0


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """A sign that a process is alive and makes progress, written by a thread of that process.

    ``number`` counts the heartbeats of this process. The main thread marks its progress:
    ``quiet_s`` is the time since its last mark by the process's own clock, and ``allowed_s`` how
    long its current activity ``doing`` may take. ``nonce`` differs between processes that use the
    same name one after another, and ``lease`` counts those processes. ``ended`` marks the last
    heartbeat of a process that ended normally. ``finished`` counts the pieces of work that it
    completed: versions, groups or evaluations. ``alarm`` says what the process could not read and
    therefore does not do, or that its store refuses requests; empty if all could be read.
    ``build`` names the build that the process runs; empty for those without a name. ``traffic`` is
    null in heartbeats of older releases.
    """

    format: int = FORMAT
    process: _Name
    role: Annotated[str, Meta(max_length=32)]
    nonce: _Name
    lease: Index
    supervised: bool
    host: Annotated[str, Meta(max_length=256)]
    pid: int
    started_at: float
    at: float
    number: Index
    doing: _Name
    quiet_s: _Seconds
    allowed_s: _Seconds
    ended: bool = False
    finished: Index = 0
    worker: WorkerStatus | None = None
    alarm: Annotated[str, Meta(max_length=MAX_ALARM)] = ""
    build: Annotated[str, Meta(max_length=MAX_BUILD)] = ""
    traffic: StoreTraffic | None = None

    @property
    def stalled(self) -> bool:
        """Returns whether the main thread has made no progress for longer than is allowed."""
        return not self.ended and self.quiet_s > self.allowed_s


class ReaderReport(msgspec.Struct, frozen=True, kw_only=True):
    """A process that follows a run's weights and has no heartbeat: a pull, a relay, a rank of an
    engine.

    At ``at`` it held ``version`` (-1: none yet), ``lag`` versions less than the newest, the first
    of which had been there for ``late_s``; ``reason`` says why, as far as it knows. ``alarm`` is
    what a reader that attests an engine found wrong there.
    """

    process: _Name
    kind: Annotated[str, Meta(max_length=32)]
    pid: Index
    started_at: _Time
    at: _Time
    version: Annotated[int, Meta(ge=-1, le=1 << 48)]
    lag: Index = 0
    late_s: _Seconds = 0.0
    reason: Annotated[str, Meta(max_length=MAX_ALARM)] = ""
    alarm: Annotated[str, Meta(max_length=MAX_ALARM)] = ""
    ended: bool = False
    build: Annotated[str, Meta(max_length=MAX_BUILD)] = ""
    traffic: StoreTraffic = StoreTraffic()


class HostReaders(msgspec.Struct, frozen=True, kw_only=True):
    """The object at ``readers/<host>.json``: the readers of one host, replaced at most once a
    minute. No decision depends on it, and nobody signs it.
    """

    format: int = FORMAT
    host: _Name
    at: _Time
    readers: Annotated[list[ReaderReport], Meta(max_length=MAX_READERS)]

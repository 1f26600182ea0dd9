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

Phase = Literal["starting", "training", "stopped", "finished"]
WorkerPhase = Literal["starting", "sampling", "stopped", "finished"]
_Seconds = Annotated[float, Meta(ge=0, le=1e9)]
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


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """A sign that a process is alive and makes progress, written by a thread of that process.

    ``number`` counts the heartbeats of this process. The main thread marks its progress:
    ``quiet_s`` is the time since its last mark by the process's own clock, and ``allowed_s`` how
    long its current activity ``doing`` may take. ``nonce`` differs between processes that use the
    same name one after another, and ``lease`` counts those processes. ``ended`` marks the last
    heartbeat of a process that ended normally. ``finished`` counts the pieces of work that it
    completed: versions, groups or evaluations. ``alarm`` says what the process could not read and
    therefore does not do, or that its store refuses requests; empty if all could be read.
    ``build`` names the build that the process runs; empty for those without a name.
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

    @property
    def stalled(self) -> bool:
        """Returns whether the main thread has made no progress for longer than is allowed."""
        return not self.ended and self.quiet_s > self.allowed_s

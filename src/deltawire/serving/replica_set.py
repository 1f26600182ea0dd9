"""Moves the replicas behind one endpoint to the version that was requested last.

Concurrency::

    request handlers                    one task for each replica
      hot_load(), aim(): wanted = N ──▶   ┌─ poll: which version does it hold?
      state():  what each said last       │  N, attested ──▶ ready; poll again in a second
      pick():   a replica for a request   │  another ──▶ (drain) load N, or record the error
                                          └─ a replica that restarted is noticed here too

A request to a replica is never assumed to have succeeded: the replica is ready when it states
itself which version it holds, with the digest from that version's manifest.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from blake3 import blake3

from deltawire.display import safe_line
from deltawire.errors import (
    BugError,
    CorruptError,
    DeltawireError,
    InputError,
    ResyncError,
    RetryError,
)
from deltawire.export.snapshots import snapshot_identity, snapshot_version
from deltawire.serving.contract import (
    CacheReset,
    HotLoad,
    LedgerEntry,
    LoadingState,
    ReplicaSetState,
    ReplicaState,
    Stage,
)
from deltawire.serving.outlier import FAILURES, Outlier
from deltawire.serving.replica import HeldVersion, Replica
from deltawire.store import Bucket
from deltawire.sync import newest_version, read_manifest
from deltawire.wire.captures import ServingReplica
from deltawire.wire.run import Run

Transition = Literal["async", "sync"]

POLL_EVERY_S = 1.0
RETRY_AT_MOST_S = 30.0
CONFIRM_WITHIN_S = 2.0
CONFIRM_EVERY_S = 0.01
"""Answers that end within this time of each other share one call."""
MAX_LEDGER = 1024
LOAD_FACTOR = 1.25
LEAST_LOAD = 8
"""A replica takes requests by session while it has fewer than `LOAD_FACTOR` times the mean, or
`LEAST_LOAD`. Source: Mirrokni et al. 2016, *Consistent hashing with bounded loads*."""


@dataclass(frozen=True)
class TargetVersion:
    """The version that replicas must hold, with the digest from its manifest; or an ``upstream``,
    which no replica loads."""

    version: int
    digest: str
    cache: CacheReset
    upstream: str = ""


@dataclass
class TrackedReplica:
    """A replica and its last known state."""

    replica: Replica
    held: HeldVersion | None = None
    stage: Stage = "pending"
    wanted: TargetVersion | None = None
    target: int | None = None
    message: str = ""
    requests: int = 0
    draining: bool = False
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    quiet: asyncio.Event = field(default_factory=asyncio.Event)
    asking: asyncio.Task[HeldVersion] | None = None
    queued: asyncio.Task[HeldVersion] | None = None
    outlier: Outlier = field(default_factory=Outlier)
    removed: bool = False
    """True once it is no replica of the set any more: its requests end, and none begins."""


@dataclass(frozen=True)
class Aim:
    """Which versions replicas were last told to hold, and which share of them."""

    serving: TargetVersion
    candidate: TargetVersion | None
    share: float
    hold_back: TargetVersion | None
    hold_back_share: float


class ReplicaSet:
    """Moves every replica to the version that was requested last, and reports their states.

    With the transition ``sync`` a replica is loaded after its requests have ended, and gets no new
    ones until then; with ``async`` it is loaded at once, and requests in flight continue over the
    swap. Before the first hot-load, replicas keep the version that they have. `replace` changes
    which replicas there are, if the set ``changes``; it may begin empty then.

    Example::

        replicas = ReplicaSet(bucket, run, [VllmReplica("http://host:8000", session)])
        replicas.start()
        await replicas.hot_load(HotLoad(identity="7"))
    """

    def __init__(
        self,
        bucket: Bucket,
        run: Run,
        replicas: Sequence[Replica],
        *,
        transition: Transition = "async",
        drain_s: float = 90.0,
        changes: bool = False,
    ) -> None:
        if len({replica.name for replica in replicas}) != len(replicas):
            raise InputError("each replica needs another name")
        if not replicas and not changes:
            raise InputError("give at least one replica")
        self.changes = changes
        self.bucket = bucket
        self.run = run
        self.transition: Transition = transition
        self.drain_s = drain_s
        self.wanted: TargetVersion | None = None
        self._aim: Aim | None = None
        self.ledger: dict[str, LedgerEntry] = {}
        self._members = [TrackedReplica(replica) for replica in replicas]
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._closing = False
        self._digests: dict[int, str] = {}

    @property
    def members(self) -> Sequence[TrackedReplica]:
        """The replicas and their last known states."""
        return self._members

    def start(self) -> None:
        """Starts one task for each replica, on the running event loop."""
        for member in self._members:
            self._start(member)

    def _start(self, member: TrackedReplica) -> None:
        loop = asyncio.get_running_loop()
        self._tasks[member.replica.name] = loop.create_task(self._supervise(member))

    def replace(self, replicas: Sequence[Replica]) -> None:
        """Makes these the run's replicas; upstreams stay. One whose name stays is kept with its
        state. A new one is told which version to hold, and takes requests once it states so; one
        that is gone ends the requests that it has."""
        urls = {replica.name: replica.base_url for replica in replicas}
        for member in [m for m in self._members if not m.replica.upstream]:
            if urls.get(member.replica.name) == member.replica.base_url:
                continue
            member.removed = True
            self._members.remove(member)
            self._tasks.pop(member.replica.name).cancel()
        known = {member.replica.name for member in self._members}
        new = [TrackedReplica(one) for one in replicas if one.name not in known]
        self._members += new
        for member in new:
            self._start(member)
        if self._aim is not None:
            self._spread(self._aim)
        elif self.wanted is not None:
            for member in new:
                self._want(member, self.wanted)

    @property
    def aimed(self) -> bool:
        """True once a decision has named the version that serves."""
        return self._aim is not None

    async def close(self) -> None:
        """Stops the tasks; the replicas keep serving."""
        self._closing = True  # `wait_for` may lose a cancellation to an event that is set then.
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def hot_load(self, request: HotLoad) -> ReplicaSetState:
        """Tells every replica to move to a version of the run; returns at once.

        Raises `InputError` if the run has no such version, or the delta names a
        base that is not an older version of the run.
        """
        if self.aimed:
            raise InputError(
                "decisions in the bucket say which version serves",
                hint="use deltawire live promote or rollback",
                run=self.bucket.url,
            )
        version = snapshot_version(self.run, request.identity)
        base = request.incremental_snapshot_metadata
        if base is not None:
            before = snapshot_version(self.run, base.previous_snapshot_identity)
            if before >= version:
                raise InputError(
                    f"version {version} cannot be a delta to version {before}",
                    hint="name an older version, or none: replicas find their own way",
                )
        digest = await asyncio.to_thread(self._digest_of, version)
        if digest is None:
            raise InputError(
                f"the run has no version {version} that can be loaded",
                hint=f"its newest is {await asyncio.to_thread(newest_version, self.bucket)}",
                run=self.bucket.url,
                version=version,
            )
        self.wanted = TargetVersion(version, digest, request.cache)
        identity = snapshot_identity(self.run, version)
        self.ledger[identity] = LedgerEntry(
            identity=identity,
            kind="full" if base is None else "delta",
            version=version,
            asked_at=time.time(),
        )
        for name in list(self.ledger)[:-MAX_LEDGER]:
            del self.ledger[name]
        for member in self._members:
            if not member.replica.upstream:
                self._want(member, self.wanted)
        return self.state()

    def _want(self, member: TrackedReplica, wanted: TargetVersion) -> None:
        if member.wanted == wanted:
            return
        member.wanted, member.target = wanted, wanted.version
        member.stage, member.message = "loading", ""
        member.wake.set()

    async def aim(
        self,
        serving: TargetVersion,
        candidate: TargetVersion | None,
        share: float,
        *,
        hold_back: TargetVersion | None = None,
        hold_back_share: float = 0.0,
    ) -> None:
        """Moves replicas to the version that serves, and the ``share`` of them to the candidate: at
        least one, unless there is one replica only, and the same ones as the share grows. Of three
        replicas and more, the ``hold_back_share`` keep the hold-back version, at least one. From
        then on `hot_load` is refused.

        Raises `CorruptError` if a version's manifest does not have the digest that is wanted.
        """
        for wanted in (serving, candidate, hold_back):
            if wanted is None or wanted.upstream:
                continue
            digest = await asyncio.to_thread(self._digest_of, wanted.version)
            if digest != wanted.digest:
                raise CorruptError(
                    f"a decision names version {wanted.version} with digest {wanted.digest}; its "
                    f"manifest states {digest}",
                    run=self.bucket.url,
                    version=wanted.version,
                )
        self._aim = Aim(serving, candidate, share, hold_back, hold_back_share)
        self.wanted = serving
        self._spread(self._aim)

    def _spread(self, aim: Aim) -> None:
        """Tells each replica which version to hold. Replicas are ranked by a hash of their names,
        so one that comes or goes moves few others."""
        serving, candidate, hold_back = aim.serving, aim.candidate, aim.hold_back
        own = [m for m in self._members if not m.replica.upstream]
        ranked = sorted(own, key=lambda m: blake3(m.replica.name.encode()).digest())
        serves = 0 if serving.upstream else 1  # Replicas that the serving version needs.
        shows = int(candidate is not None and not candidate.upstream and bool(aim.share))
        count = held = 0
        if hold_back is not None and not hold_back.upstream and len(ranked) > serves + 1:
            most = max(len(ranked) - serves - 1, 1)
            held = min(max(round(aim.hold_back_share * len(ranked)), 1), most)
        if candidate is not None and shows:
            count = min(max(round(aim.share * len(ranked)), 1), len(ranked) - held - serves)
            if not serves:  # Nothing else is wanted of these replicas.
                count = len(ranked) - held
        for place, member in enumerate(ranked):
            chosen = candidate if candidate is not None and place < count else serving
            if hold_back is not None and place >= len(ranked) - held:
                chosen = hold_back
            if not chosen.upstream:  # Otherwise it keeps what it has.
                self._want(member, chosen)

    def serves(self, version: int) -> bool:
        """Returns whether a replica that takes requests holds a version by its own statement."""
        return any(m.held and m.held.version == version and not m.draining for m in self._members)

    def state(self) -> ReplicaSetState:
        """Returns the state of every replica."""
        return ReplicaSetState(replicas=[self._state(member) for member in self._members])

    @property
    def ready(self) -> bool:
        """Returns whether every replica attested that it holds the version requested last."""
        return bool(self._members) and all(self._is_ready(member) for member in self._members)

    @property
    def draining(self) -> bool:
        """Returns whether a replica is waiting for its requests to end before it is loaded."""
        return any(member.draining for member in self._members)

    @property
    def takes_requests(self) -> bool:
        """Returns whether a replica takes requests now for the version that serves."""
        version = None if self.wanted is None else self.wanted.version
        return any(self._may_answer(m, version) for m in self._open())

    def taking_requests(self) -> dict[str, bool]:
        """Returns, by its name, whether a replica takes requests and is not left out."""
        now = time.monotonic()
        return {
            m.replica.name: m.held is not None and not m.draining and not m.outlier.is_left_out(now)
            for m in self._members
        }

    def serving(self) -> list[ServingReplica]:
        """Returns what each replica serves, for views."""
        now, found = time.monotonic(), []
        for one in self._members:
            fault = "" if one.held is not None else (one.message or one.stage)
            if not fault and one.outlier.is_left_out(now):
                fault = "left out for a while: its requests failed"
            own = one.held is not None and not one.replica.upstream
            found.append(
                ServingReplica(
                    name=one.replica.name[:256],
                    version=one.held.version if one.held is not None and own else None,
                    upstream=one.replica.upstream,
                    fault=safe_line(fault)[:256],
                )
            )
        return found[:1024]

    def pick(
        self,
        session: str = "",
        *,
        version: int | None = None,
        without: Sequence[TrackedReplica] = (),
    ) -> TrackedReplica | None:
        """Returns the replica for a request: the least busy of those that answer and do not drain;
        requests of one ``session`` stay with one replica while possible, and while that has not
        many more requests than others. None if there is none.

        Replicas that hold ``version`` come first. Where all of them are left out because they
        failed, or busy with a trial, those of the version that serves come next, and then they
        themselves. For a request that was tried on those ``without``, only sound ones of the two
        versions come: no other version gets a request because a replica failed. Without ``version``
        any replica may come, as for a first try.
        """
        now = time.monotonic()
        open_ = [m for m in self._open() if self._may_answer(m, version)]
        pools = [[m for m in open_ if m not in without]]
        if version is not None:
            serving = version if self.wanted is None else self.wanted.version
            pools = [
                [m for m in pools[0] if m.held is not None and m.held.version == wanted]
                for wanted in (version, serving)
            ]
        sound = [[m for m in pool if m.outlier.takes(now, requests=m.requests)] for pool in pools]
        rest = [] if without else [*pools, open_]
        chosen = next(filter(None, [*sound, *rest]), None)
        if chosen is None:
            return None
        if session:
            mean = (sum(member.requests for member in chosen) + 1) / len(chosen)
            bound = max(LEAST_LOAD, math.ceil(LOAD_FACTOR * mean))
            # Rendezvous hashing: other sessions keep theirs when a replica comes or goes.
            return max(
                (member for member in chosen if member.requests < bound),
                key=lambda m: blake3(f"{m.replica.name}\0{session}".encode()).digest(),
            )
        return min(chosen, key=lambda member: member.requests)

    def _open(self) -> list[TrackedReplica]:
        return [m for m in self._members if m.held is not None and not m.draining]

    def _may_answer(self, member: TrackedReplica, version: int | None) -> bool:
        """Returns whether a replica may answer for a version at all. An upstream answers only where
        a decision names it, or before the first one, if the gateway has any; the run's replicas do
        not answer for an upstream, other than those of a candidate."""
        assert member.held is not None
        own = not member.replica.upstream
        if self.wanted is None:
            first = next((m for m in self._members if m.replica.upstream), None)
            return first is None or (first is member if version is None else own)
        if own and not self.wanted.upstream:
            return True
        return member.held.version in (version, self.wanted.version)

    def report(self, member: TrackedReplica, *, ok: bool) -> None:
        """Counts how a request to a replica ended. After `FAILURES` in a row the replica is left
        out for a while (`deltawire.serving.outlier`), unless half of the replicas are already."""
        now = time.monotonic()
        others = sum(m.outlier.is_left_out(now) for m in self._members if m is not member)
        may = others + 1 <= len(self._members) // 2
        member.outlier.report(ok=ok, now=now, may_leave_out=may)

    def begin(self, member: TrackedReplica) -> None:
        """Counts a request that starts on a replica."""
        member.requests += 1

    def lost(self, member: TrackedReplica) -> None:
        """Marks a replica as unreachable until it answers a poll again."""
        member.held, member.stage = None, "pending"
        member.wake.set()

    async def confirm(self, member: TrackedReplica, before: HeldVersion | None) -> bool:
        """Asks a replica whether it still holds the version that it held ``before``: then that drew
        everything in between, as replicas change versions only when they are told to. Answers that
        end at the same time share one call."""
        if before is None or member.target not in (None, before.version):
            return False
        if member.queued is None:
            member.queued = asyncio.ensure_future(self._ask(member, member.asking))
        try:
            async with asyncio.timeout(CONFIRM_WITHIN_S):
                return await asyncio.shield(member.queued) == before
        except (DeltawireError, TimeoutError):
            return False

    async def _ask(
        self, member: TrackedReplica, before: asyncio.Task[HeldVersion] | None
    ) -> HeldVersion:
        """Ask after the call before, which began before the answers ended that wait for this."""
        await asyncio.sleep(CONFIRM_EVERY_S)
        if before is not None:
            await asyncio.wait([before])
        member.asking, member.queued = member.queued, None
        return await member.replica.held()

    def end(self, member: TrackedReplica) -> None:
        """Counts a request that ended on a replica, or was given up."""
        member.requests -= 1
        if member.requests == 0:
            member.quiet.set()

    def identity_at(self, member: TrackedReplica) -> str:
        """Returns the snapshot that a replica was last seen to hold."""
        if member.replica.upstream:
            return member.replica.name
        return "" if member.held is None else snapshot_identity(self.run, member.held.version)

    def _is_ready(self, member: TrackedReplica) -> bool:
        held, wanted = member.held, member.wanted
        if held is None or member.draining:
            return False
        if member.replica.upstream:
            return True
        if wanted is None:
            return self._digests.get(held.version) == held.digest
        return (held.version, held.digest) == (wanted.version, wanted.digest)

    def _state(self, member: TrackedReplica) -> ReplicaState:
        held, target = member.held, member.target
        message = member.message
        if not message and member.outlier.is_left_out(time.monotonic()):
            message = f"left out for a while: {FAILURES} requests in a row failed"
        return ReplicaState(
            name=member.replica.name,
            readiness=self._is_ready(member),
            current_snapshot_identity=self.identity_at(member) or None,
            loading_state=LoadingState(
                "ready" if self._is_ready(member) else member.stage,
                None if target is None else snapshot_identity(self.run, target),
                message,
            ),
            digest=held.digest if held else "",
            upstream=member.replica.upstream,
        )

    def _digest_of(self, version: int) -> str | None:
        """Returns the digest of a committed version; None if it cannot be loaded."""
        manifest = read_manifest(self.bucket, self.run, version)
        if manifest is None or manifest.pruned:
            return None
        self._digests[version] = manifest.digest
        return manifest.digest

    async def _supervise(self, member: TrackedReplica) -> None:
        pause_s = POLL_EVERY_S
        while not self._closing and not member.removed:
            wanted = member.wanted
            try:
                await self._reconcile(member, wanted)
                pause_s = member.replica.poll_every_s or POLL_EVERY_S
            except RetryError as error:
                member.held, member.stage, member.message = None, "pending", error.message
                pause_s = POLL_EVERY_S
            except DeltawireError as error:
                self._failed(member, wanted, error)
                pause_s = min(2 * pause_s, RETRY_AT_MOST_S)
            except Exception as error:  # If the task ended, its replica would stay at its version.
                fault = BugError(f"cannot update the replica: {type(error).__name__}: {error}")
                self._failed(member, wanted, fault)
                pause_s = min(2 * pause_s, RETRY_AT_MOST_S)
            finally:
                member.draining = False
            try:
                await asyncio.wait_for(member.wake.wait(), pause_s)
                pause_s = POLL_EVERY_S
            except TimeoutError:
                pass
            member.wake.clear()

    async def _reconcile(self, member: TrackedReplica, wanted: TargetVersion | None) -> None:
        """Polls a replica, and loads the wanted version if it holds another."""
        held = await member.replica.held()
        if member.replica.upstream:
            member.held, member.stage, member.message = held, "ready", ""
            return
        if held.version not in self._digests:
            with contextlib.suppress(RetryError):  # An outage of the bucket stops no answers.
                await asyncio.to_thread(self._digest_of, held.version)
        self._accept(member, held)
        if wanted is None:
            member.stage, member.message = "ready", ""
            return
        if (held.version, held.digest) != (wanted.version, wanted.digest):
            member.stage, member.target = "loading", wanted.version
            if self.transition == "sync":
                await self._drain(member)
            held = await member.replica.load(wanted.version, cache=wanted.cache)
            self._accept(member, held)
            if (held.version, held.digest) != (wanted.version, wanted.digest):
                raise ResyncError(
                    f"replica {member.replica.name} was told to load version {wanted.version} but "
                    f"holds version {held.version} with digest {held.digest}",
                    run=self.bucket.url,
                    version=wanted.version,
                )
        member.stage, member.message = "ready", ""
        entry = self.ledger.get(snapshot_identity(self.run, wanted.version))
        if entry is not None:
            entry.ready_at.setdefault(member.replica.name, time.time())

    def _accept(self, member: TrackedReplica, held: HeldVersion) -> None:
        """Accepts a replica's statement if its digest is that of the version it names; otherwise no
        requests are sent to it."""
        stated = self._digests.get(held.version)
        if stated is not None and stated != held.digest:
            member.held = None
            raise ResyncError(
                f"replica {member.replica.name} states version {held.version} with digest "
                f"{held.digest}; the manifest states {stated}",
                run=self.bucket.url,
                version=held.version,
            )
        member.held = held

    async def _drain(self, member: TrackedReplica) -> None:
        """Waits until a replica's requests have ended; raises `ResyncError` if they do not."""
        member.draining = True
        member.quiet.clear()
        if not member.requests:
            return
        try:
            await asyncio.wait_for(member.quiet.wait(), self.drain_s)
        except TimeoutError as error:
            raise ResyncError(
                f"{member.requests} requests had not ended after {self.drain_s:.0f} s",
                hint="raise --drain, or use --transition async",
                run=self.bucket.url,
            ) from error

    def _failed(
        self, member: TrackedReplica, wanted: TargetVersion | None, error: DeltawireError
    ) -> None:
        member.stage, member.message = "error", str(error)
        if wanted is not None:
            member.target = wanted.version
            entry = self.ledger.get(snapshot_identity(self.run, wanted.version))
            if entry is not None:
                entry.errors[member.replica.name] = str(error)

    def forget(self) -> None:
        """Empties the ledger."""
        self.ledger.clear()

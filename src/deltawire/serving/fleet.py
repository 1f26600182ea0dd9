"""The replicas behind one endpoint, each brought to the version last asked for.

Who waits for whom::

    request handlers               one task for each replica
      hot_load(): wanted = N ────▶   ┌─ look: what does it hold?
      state():  what each said last  │  holds N, attested ──▶ ready; look again in a second
      pick():   a replica to ask     │  holds another ──▶ (drain) load N, or say what stopped it
                                     └─ a replica that came back after a crash is found here too

Nothing that a replica was told is taken for done: it is ready when it says itself which version
it holds, with the digest that the version's manifest states.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from blake3 import blake3

from deltawire.errors import BugError, DeltawireError, InputError, ResyncError, RetryError
from deltawire.export.snapshots import snapshot_identity, snapshot_version
from deltawire.serving.contract import (
    CacheReset,
    FleetState,
    HotLoad,
    LedgerEntry,
    LoadingState,
    ReplicaState,
    Stage,
)
from deltawire.serving.replica import Held, Replica
from deltawire.store import Bucket
from deltawire.sync import newest_version, read_manifest
from deltawire.wire.run import Run

Transition = Literal["async", "sync"]

LOOK_EVERY_S = 1.0
AGAIN_AT_MOST_S = 30.0
MAX_LEDGER = 1024


@dataclass(frozen=True)
class Wanted:
    """A version that replicas are to hold, with the digest that its manifest states."""

    version: int
    digest: str
    cache: CacheReset


@dataclass
class Member:
    """A replica, and what is known of it."""

    replica: Replica
    held: Held | None = None
    stage: Stage = "pending"
    target: int | None = None
    message: str = ""
    requests: int = 0
    draining: bool = False
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    quiet: asyncio.Event = field(default_factory=asyncio.Event)


class Fleet:
    """Brings every replica to the version last asked for, and says which are there.

    With the transition ``sync`` a replica is loaded when its requests have ended, and gets no new
    ones till then; with ``async`` at once, and requests in flight go on over the swap. Until a
    first hot-load, replicas serve what they serve.
    """

    def __init__(
        self,
        bucket: Bucket,
        run: Run,
        replicas: Sequence[Replica],
        *,
        transition: Transition = "async",
        drain_s: float = 90.0,
    ) -> None:
        if len({replica.name for replica in replicas}) != len(replicas) or not replicas:
            raise InputError("a fleet needs replicas, each of a name of its own")
        self.bucket = bucket
        self.run = run
        self.transition: Transition = transition
        self.drain_s = drain_s
        self.wanted: Wanted | None = None
        self.ledger: dict[str, LedgerEntry] = {}
        self._members = [Member(replica) for replica in replicas]
        self._tasks: list[asyncio.Task[None]] = []
        self._digests: dict[int, str] = {}

    def start(self) -> None:
        """Begin to look after the replicas, on the running event loop."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._tend(member)) for member in self._members]

    async def close(self) -> None:
        """Stop; the replicas serve on."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def hot_load(self, request: HotLoad) -> FleetState:
        """Have every replica go to a version of the run; returns at once.

        Raises `InputError` if the run has no such version, or the delta is said to build on
        something that is not an older version of the run.
        """
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
        self.wanted = Wanted(version, digest, request.cache)
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
            member.target, member.stage, member.message = version, "loading", ""
            member.wake.set()
        return self.state()

    def state(self) -> FleetState:
        """How every replica stands."""
        return FleetState(replicas=[self._state(member) for member in self._members])

    @property
    def ready(self) -> bool:
        """Whether every replica holds, by its own attestation, what was asked for last."""
        return all(self._is_ready(member) for member in self._members)

    @property
    def draining(self) -> bool:
        """Whether a replica lets its requests end before it is loaded."""
        return any(member.draining for member in self._members)

    def pick(self, session: str = "") -> Member | None:
        """The replica for a request: of those that answer and do not drain, the one that has the
        fewest; requests of one ``session`` keep to one as long as that is possible. None if there
        is none now."""
        open_ = [m for m in self._members if m.held is not None and not m.draining]
        if not open_:
            return None
        if session:
            # The highest of all hashes: others keep theirs when a replica comes or goes.
            return max(
                open_, key=lambda m: blake3(f"{m.replica.name}\0{session}".encode()).digest()
            )
        return min(open_, key=lambda member: member.requests)

    def begin(self, member: Member) -> None:
        """A request goes to a replica."""
        member.requests += 1

    def lost(self, member: Member) -> None:
        """A replica cannot be reached: nothing goes there until it has answered again."""
        member.held, member.stage = None, "pending"
        member.wake.set()

    def end(self, member: Member) -> None:
        """A request came back from it, or was given up."""
        member.requests -= 1
        if member.requests == 0:
            member.quiet.set()

    def identity_at(self, member: Member) -> str:
        """The snapshot that a replica was last seen to hold."""
        return "" if member.held is None else snapshot_identity(self.run, member.held.version)

    def _is_ready(self, member: Member) -> bool:
        held, wanted = member.held, self.wanted
        if held is None or member.draining:
            return False
        if wanted is None:
            return self._digests.get(held.version) == held.digest
        return (held.version, held.digest) == (wanted.version, wanted.digest)

    def _state(self, member: Member) -> ReplicaState:
        held, target = member.held, member.target
        return ReplicaState(
            name=member.replica.name,
            readiness=self._is_ready(member),
            current_snapshot_identity=self.identity_at(member) or None,
            loading_state=LoadingState(
                "ready" if self._is_ready(member) else member.stage,
                None if target is None else snapshot_identity(self.run, target),
                member.message,
            ),
            digest=held.digest if held else "",
        )

    def _digest_of(self, version: int) -> str | None:
        """The digest of a committed version, None if there is none to be loaded."""
        manifest = read_manifest(self.bucket, self.run, version)
        if manifest is None or manifest.pruned:
            return None
        self._digests[version] = manifest.digest
        return manifest.digest

    async def _tend(self, member: Member) -> None:
        pause_s = LOOK_EVERY_S
        while True:
            wanted = self.wanted
            try:
                await self._bring(member, wanted)
                pause_s = LOOK_EVERY_S
            except RetryError as error:
                member.held, member.stage, member.message = None, "pending", error.message
                pause_s = LOOK_EVERY_S
            except DeltawireError as error:
                self._failed(member, wanted, error)
                pause_s = min(2 * pause_s, AGAIN_AT_MOST_S)
            except Exception as error:  # A task that ends in silence would leave a replica behind.
                fault = BugError(f"cannot lead the replica: {type(error).__name__}: {error}")
                self._failed(member, wanted, fault)
                pause_s = min(2 * pause_s, AGAIN_AT_MOST_S)
            finally:
                member.draining = False
            try:
                await asyncio.wait_for(member.wake.wait(), pause_s)
                pause_s = LOOK_EVERY_S
            except TimeoutError:
                pass
            member.wake.clear()

    async def _bring(self, member: Member, wanted: Wanted | None) -> None:
        """Look at a replica, and bring it where it should be."""
        held = await member.replica.held()
        if held.version not in self._digests:
            await asyncio.to_thread(self._digest_of, held.version)
        self._believe(member, held)
        if wanted is None:
            return
        if (held.version, held.digest) != (wanted.version, wanted.digest):
            member.stage, member.target = "loading", wanted.version
            if self.transition == "sync":
                await self._drain(member)
            held = await member.replica.load(wanted.version, cache=wanted.cache)
            self._believe(member, held)
            if (held.version, held.digest) != (wanted.version, wanted.digest):
                raise ResyncError(
                    f"replica {member.replica.name} was to load version {wanted.version} and "
                    f"holds version {held.version} of digest {held.digest}",
                    run=self.bucket.url,
                    version=wanted.version,
                )
        member.stage, member.message = "ready", ""
        entry = self.ledger.get(snapshot_identity(self.run, wanted.version))
        if entry is not None:
            entry.ready_at.setdefault(member.replica.name, time.time())

    def _believe(self, member: Member, held: Held) -> None:
        """Take a replica's word, if its digest is the one of the version that it names: no request
        goes to one that holds anything else."""
        stated = self._digests.get(held.version)
        if stated is not None and stated != held.digest:
            member.held = None
            raise ResyncError(
                f"replica {member.replica.name} says version {held.version}, whose digest is "
                f"{stated}, and holds {held.digest}",
                run=self.bucket.url,
                version=held.version,
            )
        member.held = held

    async def _drain(self, member: Member) -> None:
        """Wait until a replica's requests have ended; raises `ResyncError` if they do not."""
        member.draining = True
        member.quiet.clear()
        if not member.requests:
            return
        try:
            await asyncio.wait_for(member.quiet.wait(), self.drain_s)
        except TimeoutError as error:
            raise ResyncError(
                f"{member.requests} requests had not ended after {self.drain_s:.0f} s",
                hint="give them longer, or let them go on over the swap",
                run=self.bucket.url,
            ) from error

    def _failed(self, member: Member, wanted: Wanted | None, error: DeltawireError) -> None:
        member.stage, member.message = "error", str(error)
        if wanted is not None:
            member.target = wanted.version
            entry = self.ledger.get(snapshot_identity(self.run, wanted.version))
            if entry is not None:
                entry.errors[member.replica.name] = str(error)

    def forget(self) -> None:
        """Empty the ledger."""
        self.ledger.clear()

"""Moves a mirror along a run's chain of versions, one verified step at a time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from deltawire.codec import Digest, Patch
from deltawire.errors import BugError, CorruptError, ResyncError, RetryError, ThrottledError
from deltawire.store import Bucket
from deltawire.sync.chain.objects import MissingBlobError, newest_version
from deltawire.sync.chain.payloads import DamagedTableError, read_blobs
from deltawire.sync.chain.route_finder import RouteFinder
from deltawire.sync.chain.routes import Edge
from deltawire.sync.chain.version_poller import VersionPoller, newest_readable
from deltawire.sync.follow.blob_cache import BlobCache, configured_cache
from deltawire.sync.follow.fetch import KeptPieces, decode_delta
from deltawire.sync.follow.load import (
    MAX_REPLANS,
    differences,
    holds_its_version,
    jump,
    load_mirror,
)
from deltawire.sync.follow.mirror import Elements, Mirror, Patches, PiecePatch, empty_mirror
from deltawire.sync.follow.read_ahead import READERS, ReadAhead
from deltawire.wire.payload import BlobRef
from deltawire.wire.run import Run

LATE_S = 10.0
"""A reader that took longer for one step looks for the newest version before the next step, instead
of crossing the rest of its route."""


@dataclass(frozen=True)
class Update:
    """A verified step of a mirror from ``base`` to ``version``.

    ``pieces`` are the changes, ``held`` is the digest of what the mirror will hold, and ``digest``
    that of the whole model. ``bytes`` were fetched for it.

    Example::

        update = follower.prepare()
        print(update.version, update.bytes)
    """

    base: int
    version: int
    digest: Digest
    pieces: list[PiecePatch]
    held: Digest
    bytes: int
    prepare_ms: float
    patches: Mapping[str, Patch] = field(init=False)
    """The changes by tensor name, for a caller that holds whole tensors."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "patches", Patches(self.pieces))


class Subscriber:
    """Moves one mirror along a run's chain.

    Concurrent calls wait for each other: a thread of `advance_async` continues even if the task
    that awaited it was cancelled. Every method that moves the mirror first fills one that holds no
    version; `prepare` refuses it. With ``stepwise`` the mirror visits every version while that is
    possible; otherwise it takes the cheapest route to the newest version, which may lead over
    compacted deltas and anchors. ``threads`` is the number of decoding threads. ``cache`` holds
    blobs for all readers of this host; by default, the environment says where (`blob_cache`).
    ``bucket`` is used as it is: one of a class of one's own is put into a `RetryingBucket` first.

    In addition to the mirror, a step takes the memory of two blobs (64 MiB if blobs are smaller),
    and 4 bytes plus the element's width for each changed element: for bf16 5 % of the mirror if
    1.6 % change, three mirrors if everything changes.

    Example::

        subscriber = Subscriber(bucket, run, load_mirror(bucket, run))
        for version in subscriber.follow():
            use(subscriber.mirror.tensors, version)
    """

    def __init__(
        self,
        bucket: Bucket,
        run: Run,
        mirror: Mirror,
        *,
        stepwise: bool = False,
        threads: int | None = None,
        cache: BlobCache | None = None,
    ) -> None:
        self.bucket: Bucket = bucket
        self._cache = cache or configured_cache(self.bucket)
        self._blobs = ReadAhead(self.bucket, self._cache)
        self.run = run
        self.mirror = mirror
        self.stepwise = stepwise
        self._threads = threads
        self._callbacks: list[Callable[[int], None]] = []
        self._turn = threading.RLock()
        self._poller = VersionPoller(self.bucket, run)
        self._verified = -1
        self._finder: RouteFinder | None = None
        self._edges: tuple[Edge, ...] = ()
        self._failing: Edge | None = None
        self._kept = KeptPieces()
        self._late = False

    @property
    def pause_s(self) -> float:
        """Returns how long to sleep before asking again after `prepare` found nothing."""
        return self._poller.pause_s

    @property
    def alarm(self) -> CorruptError | None:
        """The reason why a newer version could not be read, None if all could."""
        return self._poller.alarm

    def prepare(self) -> Update | None:
        """Prepares the next verified step towards the newest version, None if there is no newer
        one that can be read: neither its manifest nor its piece tables are damaged.

        Changes nothing. Plans around missing and damaged objects; if no route is left, raises the
        `CorruptError` that names the first of them. Raises `RetryError` if the store does not
        answer, `ResyncError` if the mirror holds no version, or not the run's.
        """
        with self._turn:
            self._require_version()
            try:
                return self._looking_again(self._plan_and_cross)
            except DamagedTableError as error:
                version = error.version
                if version is None or newest_version(self.bucket, newer_than=version) is not None:
                    raise
                self._poller.pass_over(version, error)
                return None

    def _looking_again(self, prepare: Callable[[], Update | None]) -> Update | None:
        """Prepares a step; once more if a blob that was missing is there by now."""
        try:
            return prepare()
        except MissingBlobError as error:
            if not error.is_over(self.bucket):
                raise
            self._finder, self._edges = None, ()
            return prepare()

    def _plan_and_cross(self) -> Update | None:
        started = time.perf_counter()
        finder = self._finder
        if self._late:  # Newer versions may be there by now, and a shorter route to them.
            self._edges, self._late = (), False
        if finder is None or not self._edges or self._edges[0].base != self.mirror.version:
            finder = self._find_goal()
            if finder is None:
                return None
        for _ in range(MAX_REPLANS):
            edges = self._edges or self._find_edges(finder)
            try:
                self._request_ahead(finder, edges)
                count, update = self._cross(finder, edges, started)
            except CorruptError as error:
                self._ban(finder, error)
                self._kept.clear()
                self._edges = ()
                continue
            except ThrottledError:
                self._late = True
                raise
            self._finder, self._edges = finder, edges[count:]
            self._late = time.perf_counter() - started > LATE_S
            return update
        raise finder.error()

    def prepare_to(self, version: int) -> Update | None:
        """Prepares the next verified step towards ``version`` and never past it, None if it is
        held.

        Newer versions are reached by the cheapest route, in one step or several. An older one is
        reached in one step, with a second mirror's memory. Changes nothing; raises as `prepare`.
        """
        with self._turn:
            self._require_version()
            return self._looking_again(partial(self._prepare_to, version))

    def _prepare_to(self, version: int) -> Update | None:
        started = time.perf_counter()
        held, self._edges = self.mirror.version, ()
        if version == held:
            return None
        if version < held:
            return self._from_second_mirror(version, None, started)
        finder = self._new_finder(version)
        for _ in range(MAX_REPLANS):
            route = finder.find()
            if route is None:
                break
            try:
                return self._cross(finder, route.edges, started)[1]
            except CorruptError as error:
                self._ban(finder, error)
        raise finder.error()

    def commit(self, update: Update) -> None:
        """Moves the mirror to ``update``, which the serving weights now hold."""
        with self._turn:
            self._commit(update)

    def _commit(self, update: Update) -> None:
        if update.base != self.mirror.version:
            raise BugError(
                f"an update of version {update.base} for a mirror at {self.mirror.version}",
                run=self.bucket.url,
                version=update.version,
            )
        self.mirror.move(update.pieces, update.version, update.digest, update.held)
        self._verified = update.version
        self._notify(update.version)

    def _notify(self, version: int) -> None:
        for callback in self._callbacks:
            callback(version)

    def fill(self) -> bool:
        """Loads the newest version into a mirror that holds none: a new one, or one whose move was
        interrupted. Returns whether it did. Raises as `load_mirror`.
        """
        with self._turn:
            if self.mirror.version >= 0:
                return False
            newest = newest_readable(self.bucket, self.run)
            if newest is None:
                return False
            filled = load_mirror(
                self.bucket, self.run, into=self.mirror, resume=True, threads=self._threads,
                known=newest,
            )  # fmt: skip
            self._verified = filled.version
            self._notify(filled.version)
            return True

    def _require_version(self) -> None:
        if self.mirror.version < 0:
            raise ResyncError(
                "the mirror holds no version to continue from",
                hint="fill it first, then load the served weights from it again",
                run=self.bucket.url,
            )

    def on_version(self, callback: Callable[[int], None]) -> None:
        """Calls ``callback`` with each version that the mirror reaches, from the thread that
        commits it."""
        self._callbacks.append(callback)

    def advance(self) -> bool:
        """Prepares and commits as many steps as there are. Returns whether there was any."""
        with self._turn:
            moved = self.fill()
            while self.mirror.version >= 0 and (update := self.prepare()) is not None:
                self.commit(update)
                moved = True
            return moved

    def wait_for(self, version: int, *, timeout_s: float | None = None) -> int:
        """Advances until the mirror is at ``version`` or a newer one, which is returned.

        Raises `RetryError` if it is not committed within ``timeout_s``.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self.advance()
            if self.mirror.version >= version:
                return self.mirror.version
            if deadline is not None and time.monotonic() >= deadline:
                alarm = f": {self.alarm.message}" if self.alarm is not None else ""
                raise RetryError(
                    f"version {version} was not committed within {timeout_s} s{alarm}",
                    run=self.bucket.url,
                    version=version,
                )
            time.sleep(self.pause_s)

    def follow(self, *, stop: threading.Event | None = None) -> Iterator[int]:
        """Yields every version that the mirror reaches, until ``stop`` is set."""
        stop = stop or threading.Event()
        while not stop.is_set():
            try:
                reached = self._step()
            except ThrottledError:  # Late, not lost: what arrived is kept.
                reached = None
            if reached is None:
                stop.wait(self.pause_s)
                continue
            yield reached

    def _step(self) -> int | None:
        """Takes one step. Returns the version reached, None if there is no newer one yet."""
        with self._turn:
            if self.fill():
                return self.mirror.version
            update = self.prepare() if self.mirror.version >= 0 else None
            if update is None:
                return None
            self.commit(update)
            return update.version

    async def advance_async(self) -> bool:
        """Runs `advance` without blocking the event loop."""
        return await asyncio.to_thread(self.advance)

    async def wait_for_async(self, version: int, *, timeout_s: float | None = None) -> int:
        """Runs `wait_for` without blocking the event loop; cancelling it stops between two
        polls."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self.mirror.version < version:
            if await self.advance_async() or self.mirror.version >= version:
                continue
            if deadline is not None and time.monotonic() >= deadline:
                return await asyncio.to_thread(self.wait_for, version, timeout_s=0)
            await asyncio.sleep(self.pause_s)
        return self.mirror.version

    async def follow_async(self) -> AsyncIterator[int]:
        """Runs `follow` without blocking the event loop, until it is closed or cancelled."""
        while True:
            try:
                reached = await asyncio.to_thread(self._step)
            except ThrottledError:
                reached = None
            if reached is None:
                await asyncio.sleep(self.pause_s)
                continue
            yield reached

    def _new_finder(self, goal: int) -> RouteFinder:
        held = self.mirror.version
        finder = RouteFinder(self.bucket, self.run, held=held, goal=goal)
        if self._verified != held:
            if not holds_its_version(finder, self.mirror):
                raise ResyncError(
                    "the mirror does not hold the digest that its version has in this run",
                    hint="load it again",
                    run=self.bucket.url,
                    version=held,
                )
            self._verified = held
        return finder

    def _find_goal(self) -> RouteFinder | None:
        """Returns a finder towards the newest version that can be read, None if it is held."""
        self._edges = ()
        newest = self._poller.newer(self.mirror.version, nearest=self.stepwise)
        if newest is None:
            if self._verified != self.mirror.version:
                self._new_finder(self.mirror.version)
            return None
        finder = self._new_finder(newest.version)
        for manifest in (*self._poller.found, newest):
            finder.know(manifest)
        return finder

    def _find_edges(self, finder: RouteFinder) -> tuple[Edge, ...]:
        route = finder.find()
        if route is None:
            # The goal cannot be reached; a newer version may be reachable around the damage.
            newest = newest_version(self.bucket, newer_than=finder.goal)
            if newest is not None:
                finder.goal = newest
                route = finder.find()
        route = route or finder.find_newest(newer_than=self.mirror.version)
        if route is None:
            raise finder.error()
        return route.edges

    def _ban(self, finder: RouteFinder, error: CorruptError) -> None:
        assert self._failing is not None
        finder.ban(self._failing, error)

    def _request_ahead(self, finder: RouteFinder, edges: tuple[Edge, ...]) -> None:
        """Requests the blobs of several steps at once, so that their round trips overlap."""
        blobs: list[BlobRef] = []
        if not self.bucket.local:
            for edge in edges[:READERS]:
                self._failing = edge
                if edge.target > self.mirror.version:
                    ref = finder.step(edge)[1]
                    table = ref.table_blob
                    blobs += read_blobs(self.bucket, self.run, ref) if table is None else [table]
        self._blobs.expect(blobs)

    def _cross(
        self, finder: RouteFinder, edges: tuple[Edge, ...], started: float
    ) -> tuple[int, Update]:
        """Returns how many edges the next update crosses, and the update. It crosses one edge or,
        if that is an anchor older than the mirror, as many as it takes to get past the mirror's
        version.
        """
        edge = self._failing = edges[0]
        if edge.target <= self.mirror.version:
            return self._detour(edges, started)
        step, payload = finder.step(edge)
        if edge.kind == "anchor":
            pieces, held = jump(
                self._blobs, self.run, step, payload, self.mirror, threads=self._threads
            )
        else:
            pieces, held = decode_delta(
                self._blobs, self.run, step, payload, self.mirror,
                threads=self._threads, cache=self._cache, kept=self._kept,
            )  # fmt: skip
        self._kept.clear()
        return 1, self._update(step.version, step.digest, pieces, held, edge.bytes, started)

    def _detour(self, edges: tuple[Edge, ...], started: float) -> tuple[int, Update]:
        """Avoids a damaged object from an older anchor, in a second mirror. This is rare, so its
        memory is acceptable.
        """
        target = next(edge.target for edge in edges if edge.target > self.mirror.version)
        count = 1 + next(i for i, edge in enumerate(edges) if edge.target == target)
        spent = sum(edge.bytes for edge in edges[:count])
        return count, self._from_second_mirror(target, spent, started)

    def _from_second_mirror(self, target: int, spent: int | None, started: float) -> Update:
        """Returns the step to ``target`` computed from a second mirror, for which ``spent`` bytes
        were fetched (unknown: as many as it holds).
        """
        spans = {
            name: Elements(first, first + bits.size)
            for name, bits in self.mirror.tensors.items()
            for first in [self.mirror.starts.get(name, 0)]
        }
        other = load_mirror(
            self.bucket, self.run, at=target, into=empty_mirror(self.run, spans),
            threads=self._threads,
        )  # fmt: skip
        pieces = list(differences(self.mirror, other, self.run.chunk))
        if spent is None:
            spent = sum(bits.nbytes for bits in other.tensors.values())
        return self._update(target, other.digest.hex(), pieces, other.held_digest, spent, started)

    def _update(
        self,
        version: int,
        digest: str,
        pieces: list[PiecePatch],
        held: Digest,
        fetched: int,
        started: float,
    ) -> Update:
        spent_ms = (time.perf_counter() - started) * 1e3
        whole = Digest.from_hex(digest)
        return Update(self.mirror.version, version, whole, pieces, held, fetched, spent_ms)

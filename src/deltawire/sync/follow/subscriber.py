"""The reading side: prepare the next step beside the serving weights, then take it up.

Who waits for whom::

    follower's thread                                  serving thread
        poll manifest N+1, plan, fetch, verify, decode
        ──── update (one at a time) ─────────────────▶ between two steps: swap, then
        ◀──────────────────────────── committed ────── follower.commit(update)
        mirror moves on, poll the next

Nothing that can fail is left for the serving thread but the attestation of what it holds.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from deltawire import codec
from deltawire.codec import Digest, Patch
from deltawire.errors import BugError, CorruptError, DeltawireError, ResyncError, RetryError
from deltawire.store import Bucket
from deltawire.sync.chain.objects import newest_version, read_manifest, with_retries
from deltawire.sync.chain.route_finder import RouteFinder
from deltawire.sync.chain.routes import Edge, Route
from deltawire.sync.follow.fetch import decode_delta
from deltawire.sync.follow.load import MAX_REPLANS, difference, jump, load_mirror
from deltawire.sync.follow.mirror import Mirror, Patches, PiecePatch, Span, empty_mirror
from deltawire.wire import keys
from deltawire.wire.run import Run

LOOK_EVERY_POLLS = 20
"""While version N+1 is not there, every so many looks for it a listing shows whether a newer one
is: a manifest that got lost must not be waited for."""


@dataclass(frozen=True)
class Update:
    """A verified step of the mirror from ``base`` to ``version``.

    ``pieces`` are what changes, ``held`` is the digest of what the mirror will hold, and
    ``digest`` that of the whole model. ``bytes`` is what was fetched for it.
    """

    base: int
    version: int
    digest: Digest
    pieces: list[PiecePatch]
    held: Digest
    bytes: int
    prepare_ms: float
    patches: Mapping[str, Patch] = field(init=False)
    """The same by tensor name, for whoever holds tensors whole."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "patches", Patches(self.pieces))


class Subscriber:
    """Moves one mirror along a run's chain. Threads that use it at once wait for each other: one of
    `advance_async` goes on although whoever awaited it was cancelled.

    A mirror that holds no version is filled first by whatever moves it; `prepare` refuses it.
    With ``stepwise`` every version is visited while that is possible; else the mirror takes the
    cheapest way to the newest version, which may lead over folds and anchors. ``threads`` decode.

    Beside the mirror a step takes two of its blobs, and 4 bytes and its width for each element that
    changes: of bf16 5 % of the mirror at 1.6 % changed, three mirrors if everything does.
    """

    def __init__(
        self,
        bucket: Bucket,
        run: Run,
        mirror: Mirror,
        *,
        stepwise: bool = False,
        threads: int | None = None,
    ) -> None:
        self.bucket = bucket
        self.run = run
        self.mirror = mirror
        self.stepwise = stepwise
        self._threads = threads
        self._callbacks: list[Callable[[int], None]] = []
        self._turn = threading.RLock()
        self._polls = 0
        self._survey: RouteFinder | None = None
        self._ahead: tuple[Edge, ...] = ()

    def prepare(self) -> Update | None:
        """The next verified step towards the newest version, None if there is no newer one.

        Changes nothing. What is missing or damaged is got around over folds and anchors, if there
        are any; else raises the `CorruptError` that names it. Raises `RetryError` if the store
        does not answer, `ResyncError` if the mirror holds no version.
        """
        with self._turn:
            self._require_version()
            return self._prepare()

    def _prepare(self) -> Update | None:
        started = time.perf_counter()
        survey = self._survey
        if survey is None or not self._ahead or self._ahead[0].base != self.mirror.version:
            survey = self._look()
            if survey is None:
                return None
        for _ in range(MAX_REPLANS):
            edges = self._ahead or self._find(survey)
            try:
                count, update = self._take(survey, edges, started)
            except CorruptError as error:
                survey.ban(self._blamed, error)
                self._ahead = ()
                continue
            self._survey, self._ahead = survey, edges[count:]
            return update
        raise survey.error()

    def prepare_to(self, version: int) -> Update | None:
        """The next verified step towards ``version`` and never past it, None if it is held.

        Newer versions are reached over the cheapest way, in one step or several. An older one is
        reached in one, from a second mirror, which is the price of going back. Changes nothing;
        raises as `prepare` does.
        """
        with self._turn:
            self._require_version()
            return self._prepare_to(version)

    def _prepare_to(self, version: int) -> Update | None:
        started = time.perf_counter()
        held, self._ahead = self.mirror.version, ()
        if version == held:
            return None
        if version < held:
            return self._beside(version, None, started)
        survey = RouteFinder(self.bucket, self.run, self.mirror, held, version)
        for _ in range(MAX_REPLANS):
            route = survey.find()
            if route is None:
                break
            try:
                return self._take(survey, route.edges, started)[1]
            except CorruptError as error:
                survey.ban(self._blamed, error)
        raise survey.error()

    def commit(self, update: Update) -> None:
        """Move the mirror forward, once the serving weights hold ``update``."""
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
        self._tell(update.version)

    def _tell(self, version: int) -> None:
        for callback in self._callbacks:
            callback(version)

    def fill(self) -> bool:
        """Bring a mirror that holds no version, because it is new or because somebody interrupted a
        move, to the newest one; whether that was done. Raises as `load_mirror` does."""
        with self._turn:
            if self.mirror.version >= 0:
                return False
            filled = load_mirror(
                self.bucket, self.run, into=self.mirror, resume=True, threads=self._threads
            )
            if filled is not None:
                self._tell(filled.version)
            return filled is not None

    def _require_version(self) -> None:
        if self.mirror.version < 0:
            raise ResyncError(
                "the mirror holds no version to go on from",
                hint="fill it first, and load what is served from it again",
                run=self.bucket.url,
            )

    def on_version(self, callback: Callable[[int], None]) -> None:
        """Call ``callback`` with each version that the mirror reaches, from whichever thread
        commits it."""
        self._callbacks.append(callback)

    def advance(self) -> bool:
        """Prepare and commit as many steps as there are; whether there was any."""
        with self._turn:
            moved = self.fill()
            while self.mirror.version >= 0 and (update := with_retries(self.prepare)) is not None:
                self.commit(update)
                moved = True
            return moved

    def wait_for(self, version: int, *, timeout_s: float | None = None) -> int:
        """Advance until the mirror is at ``version`` or a newer one, which is returned.

        Raises `RetryError` if it is not committed within ``timeout_s``.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self.advance()
            if self.mirror.version >= version:
                return self.mirror.version
            if deadline is not None and time.monotonic() >= deadline:
                raise RetryError(
                    f"version {version} was not committed within {timeout_s} s",
                    run=self.bucket.url,
                    version=version,
                )
            time.sleep(self.bucket.poll_s)

    def follow(self, *, stop: threading.Event | None = None) -> Iterator[int]:
        """Yield every version that the mirror reaches, for ever or until ``stop`` is set."""
        stop = stop or threading.Event()

        def pause(seconds: float) -> None:
            stop.wait(seconds)

        while not stop.is_set():
            reached = self._step(pause)
            if reached is None:
                stop.wait(self.bucket.poll_s)
                continue
            yield reached

    def _step(self, pause: Callable[[float], None] = time.sleep) -> int | None:
        """The version that one step led to, None if there is none yet."""
        with self._turn:
            if self.fill():
                return self.mirror.version
            update = None
            if self.mirror.version >= 0:
                update = with_retries(self.prepare, pause=pause)
            if update is None:
                return None
            self.commit(update)
            return update.version

    async def advance_async(self) -> bool:
        """As `advance`, beside the event loop."""
        return await asyncio.to_thread(self.advance)

    async def wait_for_async(self, version: int, *, timeout_s: float | None = None) -> int:
        """As `wait_for`, beside the event loop; cancelling it stops between two looks."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self.mirror.version < version:
            if await self.advance_async() or self.mirror.version >= version:
                continue
            if deadline is not None and time.monotonic() >= deadline:
                return await asyncio.to_thread(self.wait_for, version, timeout_s=0)
            await asyncio.sleep(self.bucket.poll_s)
        return self.mirror.version

    async def follow_async(self) -> AsyncIterator[int]:
        """As `follow`, beside the event loop, until it is closed or cancelled."""
        while True:
            reached = await asyncio.to_thread(self._step)
            if reached is None:
                await asyncio.sleep(self.bucket.poll_s)
                continue
            yield reached

    def _look(self) -> RouteFinder | None:
        """What lies ahead: None if nothing does."""
        held, self._ahead = self.mirror.version, ()
        following, damage = None, None
        try:
            following = read_manifest(self.bucket, self.run, held + 1)
        except CorruptError as error:
            damage = error
        usable = following is not None and not following.pruned
        goal: int | None = held + 1
        if not usable:
            self._polls += 1
            if damage is None and following is None and self._polls % LOOK_EVERY_POLLS != 1:
                return None
            goal = newest_version(self.bucket, newer_than=held)
        elif not self.stepwise and self.bucket.exists(keys.manifest(held + 2)):
            goal = newest_version(self.bucket, newer_than=held + 1)
        if goal is None:
            if damage is not None:
                raise damage
            return None
        self._polls = 0 if usable else self._polls
        survey = RouteFinder(self.bucket, self.run, self.mirror, held, goal)
        if following is not None:
            survey.know(following)
        elif damage is not None:
            survey.failure = damage
        return survey

    def _find(self, survey: RouteFinder) -> tuple[Edge, ...]:
        route: Route | None = survey.find()
        newest = None if route else newest_version(self.bucket, newer_than=survey.goal)
        if route is None and newest is not None:
            # A step that leads nowhere: perhaps a newer version can be reached around it.
            survey.goal = newest
            route = survey.find()
        route = route or survey.find_any(newer_than=self.mirror.version)
        if route is None:
            raise survey.error()
        return route.edges

    def _take(
        self, survey: RouteFinder, edges: tuple[Edge, ...], started: float
    ) -> tuple[int, Update]:
        """The update over the first edge, or, where that is an anchor behind the mirror, over as
        many as lead past it; and how many these are."""
        edge = self._blamed = edges[0]
        if edge.target <= self.mirror.version:
            return self._detour(edges, started)
        step, payload = survey.step(edge)
        take = jump if edge.kind == "anchor" else decode_delta
        pieces, held = take(
            self.bucket, self.run, step, payload, self.mirror, threads=self._threads
        )
        return 1, self._update(step.version, step.digest, pieces, held, edge.bytes, started)

    def _detour(self, edges: tuple[Edge, ...], started: float) -> tuple[int, Update]:
        """From an older anchor around what is damaged, in a second mirror; rare, so that its
        memory is the price."""
        target = next(edge.target for edge in edges if edge.target > self.mirror.version)
        count = 1 + next(i for i, edge in enumerate(edges) if edge.target == target)
        spent = sum(edge.bytes for edge in edges[:count])
        return count, self._beside(target, spent, started)

    def _beside(self, target: int, spent: int | None, started: float) -> Update:
        """The step to ``target`` by way of a second mirror, for which ``spent`` bytes are fetched
        (as many as it holds if that is not known)."""
        spans = {
            name: Span(self.mirror.starts.get(name, 0), self.mirror.starts.get(name, 0) + bits.size)
            for name, bits in self.mirror.tensors.items()
        }
        other = load_mirror(
            self.bucket, self.run, at=target, into=empty_mirror(self.run, spans),
            threads=self._threads,
        )  # fmt: skip
        assert other is not None
        pieces = [
            difference(name, self.mirror.starts.get(name, 0) + at, self.mirror, chunk)
            for name, bits in other.tensors.items()
            for at in range(0, bits.size, self.run.chunk)
            for chunk in [bits[at : at + self.run.chunk]]
        ]
        pieces = [piece for piece in pieces if len(piece.positions)]
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
        whole = codec.Digest.from_hex(digest)
        return Update(self.mirror.version, version, whole, pieces, held, fetched, spent_ms)


class Steps(Protocol):
    """Where a `Follower`'s updates come from: a `Subscriber`, or `ManifestFollower`."""

    bucket: Bucket

    def prepare(self) -> Update | None:
        """The next step, None if there is none yet."""
        ...

    def commit(self, update: Update) -> None:
        """It was taken up."""
        ...


class Follower:
    """A thread that always has the next update ready.

    `take` hands out each update once; the next is prepared after `commit`. An error that retrying
    does not mend is raised by `take`. A store that does not answer is asked again for as long as
    ``patience_s``. ``stage`` is called in the thread with each update before that is handed out,
    for what serving need not wait for; what it raises, `take` does.
    """

    def __init__(
        self,
        subscriber: Steps,
        *,
        patience_s: float = 300.0,
        stage: Callable[[Update], None] = lambda _: None,
    ) -> None:
        self._subscriber = subscriber
        self._stage = stage
        self._patience_s = patience_s
        self._stop = threading.Event()
        self._wanted = threading.Event()
        self._wanted.set()
        self._update: Update | None = None
        self._error: DeltawireError | None = None
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    def take(self) -> Update | None:
        """The prepared update, None if there is none yet; raises what following failed with."""
        if self._error is not None:
            raise self._error
        update, self._update = self._update, None
        return update

    def commit(self, update: Update) -> None:
        """The serving weights hold ``update``: move the mirror, and prepare the next."""
        self._subscriber.commit(update)
        self._wanted.set()

    def close(self) -> None:
        """Stop following."""
        self._stop.set()
        self._wanted.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    def _run(self) -> None:
        poll_s = self._subscriber.bucket.poll_s
        answered = time.monotonic()
        while not self._stop.is_set():
            if not self._wanted.is_set():
                self._wanted.wait()
                answered = time.monotonic()  # The serving thread's time is not the store's.
            try:
                update = with_retries(self._subscriber.prepare, pause=self._pause)
                answered = time.monotonic()
                if update is not None:
                    self._stage(update)
            except RetryError as error:
                if time.monotonic() - answered > self._patience_s:
                    self._error = error
                    return
                continue
            except DeltawireError as error:
                self._error = error
                return
            except Exception as error:  # A thread that ends in silence would stall its owner.
                self._error = BugError(f"cannot follow: {type(error).__name__}: {error}")
                self._error.__cause__ = error
                return
            if update is None:
                self._stop.wait(poll_s)
                continue
            self._wanted.clear()
            self._update = update

    def _pause(self, seconds: float) -> None:
        self._stop.wait(seconds)

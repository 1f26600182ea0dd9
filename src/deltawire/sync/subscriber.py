"""The reading side: prepare the next version beside the serving weights, then take it up.

Who waits for whom::

    follower's thread                                  serving thread
        poll manifest N+1, fetch, verify, decode
        ──── update N+1 (one at a time) ─────────────▶ between two steps: swap, then
        ◀──────────────────────────── committed ────── follower.commit(update)
        mirror moves to N+1, poll manifest N+2

Nothing that can fail is left for the serving thread but the attestation of what it holds.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from deltawire import codec
from deltawire.codec import Digest, Patch
from deltawire.errors import BugError, CorruptError, DeltawireError, RetryError
from deltawire.store import Bucket
from deltawire.sync.chain import newest_version, read_manifest, with_retries
from deltawire.sync.mirror import Mirror, decode_delta, load_mirror
from deltawire.wire.run import Run


@dataclass(frozen=True)
class Update:
    """A verified step of the mirror to ``version``: patches by tensor name."""

    base: int
    version: int
    digest: Digest
    patches: dict[str, Patch]
    bytes: int
    prepare_ms: float


class Subscriber:
    """Moves one mirror along a run's chain. Not for use by several threads at once."""

    def __init__(self, bucket: Bucket, run: Run, mirror: Mirror) -> None:
        self.bucket = bucket
        self.run = run
        self.mirror = mirror

    def prepare(self) -> Update | None:
        """The step to the next version, None while it is not committed. Changes nothing.

        A delta that is missing or damaged is got around over a newer anchor, if there is one;
        else raises `CorruptError`. Raises `RetryError` if the store does not answer.
        """
        started = time.perf_counter()
        version = self.mirror.version + 1
        try:
            manifest = read_manifest(self.bucket, self.run, version)
            if manifest is None:
                return None
            if manifest.delta is None or manifest.base != self.mirror.version:
                raise CorruptError(
                    "the next version does not build on the one held",
                    run=self.bucket.url,
                    version=version,
                )
            patches, digest = decode_delta(
                self.bucket, self.run, manifest, manifest.delta, self.mirror
            )
        except CorruptError as error:
            return self._around(error, started)
        return Update(
            self.mirror.version,
            version,
            digest,
            patches,
            manifest.delta.bytes,
            (time.perf_counter() - started) * 1e3,
        )

    def commit(self, update: Update) -> None:
        """Move the mirror forward, once the serving weights hold ``update``."""
        self.mirror.apply(update.patches, update.version, update.digest)

    def _around(self, cause: CorruptError, started: float) -> Update:
        """A step straight to the newest version that does not need the damaged object."""
        newest = newest_version(self.bucket)
        for version in range(newest or 0, self.mirror.version, -1):
            try:
                target = load_mirror(self.bucket, self.run, at=version)
            except CorruptError:
                continue
            if target is not None:
                break
        else:
            raise cause
        patches = {
            name: patch
            for name, bits in target.tensors.items()
            if len((patch := codec.diff(self.mirror.tensors[name], bits)).positions)
        }
        total = sum(bits.nbytes for bits in target.tensors.values())
        spent_ms = (time.perf_counter() - started) * 1e3
        return Update(self.mirror.version, target.version, target.digest, patches, total, spent_ms)


class Follower:
    """A thread that always has the next update ready.

    `take` hands out each update once; the next is prepared after `commit`. An error that retrying
    does not mend is raised by `take`. A store that does not answer is asked again for as long as
    ``patience_s``.
    """

    def __init__(self, subscriber: Subscriber, *, patience_s: float = 300.0) -> None:
        self._subscriber = subscriber
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

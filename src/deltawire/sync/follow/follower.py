"""Runs a subscriber in a thread, so that the next update is ready when serving can swap.

Concurrency::

    follower's thread                                  serving thread
        poll, plan, fetch, verify, decode
        ──── update (one at a time) ─────────────────▶ between two steps: swap, then
        ◀──────────────────────────── committed ────── follower.commit(update)
        the mirror moves on, poll again

Everything that can fail happens before the serving thread sees an update, except the attestation of
the swapped weights.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from deltawire.errors import BugError, CorruptError, DeltawireError, RetryError, ThrottledError
from deltawire.store import Bucket
from deltawire.sync.follow.subscriber import Update

DAMAGE_PATIENCE_S = 10.0
"""Seconds during which damage that no route avoids is read again: the response may be damaged, not
the object.
"""

LONGEST_PAUSE_S = 5.0
"""The longest pause between two attempts that fail."""


class Steps(Protocol):
    """A source of updates for a `Follower`: a `Subscriber`, or a `ManifestFollower`.

    Example::

        steps: Steps = Subscriber(bucket, run, mirror)
        if (update := steps.prepare()) is not None:
            steps.commit(update)
    """

    bucket: Bucket

    @property
    def pause_s(self) -> float:
        """Returns how long to sleep after `prepare` found nothing."""

    @property
    def alarm(self) -> CorruptError | None:
        """Why a newer manifest could not be read, None if all could."""

    def prepare(self) -> Update | None:
        """Prepares the next step, None if there is none yet."""

    def commit(self, update: Update) -> None:
        """Records that ``update`` is in use."""


class Follower:
    """A thread that keeps the next update ready.

    `poll` returns each update once; the next is prepared after `commit`. Errors that persist are
    raised by `poll`: a store that does not answer is retried for ``patience_s`` (one that refuses
    because there are too many requests for as long as it does), and damage that no route avoids is
    read again for ``damage_patience_s``. ``stage`` is called in the thread with
    each update before `poll` returns it, for work that serving need not wait for; `poll` raises its
    errors.

    Example::

        follower = Follower(Subscriber(bucket, run, mirror))
        follower.start()
        while serving:
            if (update := follower.poll()) is not None:
                swap(update)
                follower.commit(update)
    """

    def __init__(
        self,
        steps: Steps,
        *,
        patience_s: float = 300.0,
        damage_patience_s: float = DAMAGE_PATIENCE_S,
        stage: Callable[[Update], None] = lambda _: None,
    ) -> None:
        self._steps = steps
        self._stage = stage
        self._patience_s = patience_s
        self._damage_patience_s = damage_patience_s
        self._stop = threading.Event()
        self._wanted = threading.Event()
        self._wanted.set()
        self._update: Update | None = None
        self._error: DeltawireError | None = None
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)

    @property
    def alarm(self) -> CorruptError | None:
        """Why a newer manifest could not be read, None if all could."""
        return self._steps.alarm

    def start(self) -> None:
        """Starts to follow."""
        self._thread.start()

    def poll(self) -> Update | None:
        """Returns the prepared update, None if there is none yet; raises the error that ended the
        thread."""
        ended = self._thread.ident is not None and not self._thread.is_alive()
        if self._error is not None:
            raise self._error
        if ended and not self._stop.is_set():
            raise BugError("the follower's thread ended without an error")
        update, self._update = self._update, None
        return update

    def commit(self, update: Update) -> None:
        """Moves the mirror to ``update``, which the serving weights now hold, and starts to prepare
        the next.
        """
        self._steps.commit(update)
        self._wanted.set()

    def close(self) -> None:
        """Stops following."""
        self._stop.set()
        self._wanted.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    def _run(self) -> None:
        try:
            self._follow()
        except DeltawireError as error:
            self._error = error
        except BaseException as error:  # A thread that ended silently would stall its owner.
            self._error = BugError(f"cannot follow: {type(error).__name__}: {error}")
            self._error.__cause__ = error

    def _follow(self) -> None:
        succeeded, failures = time.monotonic(), 0
        while not self._stop.is_set():
            if not self._wanted.is_set():
                self._wanted.wait()
                succeeded = (
                    time.monotonic()
                )  # Do not count the time that serving took as the store's.
            try:
                update = self._steps.prepare()
            except ThrottledError:  # The update is late, and what arrived of it is kept.
                succeeded = time.monotonic()
                self._stop.wait(LONGEST_PAUSE_S)
                continue
            except (RetryError, CorruptError) as error:
                damaged = isinstance(error, CorruptError)
                patience_s = self._damage_patience_s if damaged else self._patience_s
                failures += 1
                pause_s = min(self._steps.pause_s * 2**failures, LONGEST_PAUSE_S)
                if time.monotonic() + pause_s - succeeded > patience_s:
                    raise
                self._stop.wait(pause_s)
                continue
            succeeded, failures = time.monotonic(), 0
            if update is None:
                self._stop.wait(self._steps.pause_s)
                continue
            self._stage(update)
            self._wanted.clear()
            self._update = update

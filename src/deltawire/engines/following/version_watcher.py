"""Polls a run for newer versions, in a thread of the process that swaps."""

from __future__ import annotations

import threading
import time
from typing import Protocol

from deltawire.errors import DeltawireError
from deltawire.store import Bucket
from deltawire.sync import read_run
from deltawire.sync.chain.version_poller import VersionPoller

POLL_EVERY_S = 0.02
"""Seconds between polls of the ranks' preparation."""


class Controller(Protocol):
    """The side that the watcher leads: it sets ``wanted``, and wakes the engine's loop."""

    wanted: int

    def busy(self) -> bool:
        """Returns whether the loop must be woken even if no newer version was found."""
        ...

    def wake(self) -> None:
        """Wakes a sleeping loop."""
        ...


class VersionWatcher(threading.Thread):
    """Polls for newer versions, and wakes the engine's loop when it has work to do.

    `failure_now` reports the error of a poll until one succeeds, and the end of the thread.
    """

    def __init__(
        self, controller: Controller, bucket: Bucket, *, polling: bool, public_key: str = ""
    ) -> None:
        super().__init__(name="deltawire-watch", daemon=True)
        self.failure = ""
        self._controller = controller
        self._bucket = bucket
        self._polling = polling
        self._public_key = public_key
        self._poller: VersionPoller | None = None
        self._closed = threading.Event()

    def failure_now(self) -> str:
        """Returns why newer versions cannot be found at present; empty if they can."""
        if self.ident is not None and not self.is_alive() and not self._closed.is_set():
            return f"the thread that polls for versions has died: {self.failure}"
        return self.failure

    def run(self) -> None:
        """Polls until `close`."""
        poll_at = 0.0
        try:
            while not self._closed.wait(POLL_EVERY_S):
                if self._polling and time.monotonic() >= poll_at:
                    self._try_to_poll()
                    poll_at = time.monotonic() + (
                        self._poller.pause_s if self._poller else self._bucket.poll_s
                    )
                if self._controller.busy():
                    self._controller.wake()
        except BaseException as error:
            self.failure = f"{type(error).__name__}: {error}"
            raise

    def close(self) -> None:
        """Ends the thread once its last request is answered."""
        self._closed.set()
        if self.is_alive():
            self.join()

    def _try_to_poll(self) -> None:
        try:
            self._poll()
            self.failure = ""
        except DeltawireError as error:
            self.failure = str(error)
        except BaseException as error:  # A panic in the store's client is not an `Exception`.
            self.failure = f"cannot poll for versions: {type(error).__name__}: {error}"

    def _poll(self) -> None:
        if self._poller is None:
            run = read_run(self._bucket, public_key=self._public_key)
            self._poller = VersionPoller(self._bucket, run)
        newest = self._poller.newer(self._controller.wanted)
        if newest is not None:
            self._controller.wanted = newest.version

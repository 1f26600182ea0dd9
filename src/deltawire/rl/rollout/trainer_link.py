"""Trainer link: keeps a worker's copy of the trainer's status up to date."""

from __future__ import annotations

import contextlib
import threading
import time

from deltawire.errors import CorruptError, DeltawireError, RetryError, SignatureError
from deltawire.rl.control.challenges import read_challenge
from deltawire.runtime.fleet import read_trainer
from deltawire.runtime.heartbeat import HEARTBEAT_S, read_heartbeat
from deltawire.runtime.liveness import Liveness
from deltawire.store import Bucket
from deltawire.wire.status import TrainerStatus

RETRY_S = 1.0


class TrainerLink(threading.Thread):
    """Polls ``trainer.json`` and the trainer's heartbeat in a thread.

    While the store does not answer, or the object is not the trainer's, ``status`` stays as it was
    and ``alarm`` holds the reason. ``error`` holds any error that waiting cannot resolve;
    `raise_error` raises it.
    """

    def __init__(self, bucket: Bucket, worker: str, *, silence_s: float) -> None:
        super().__init__(name="trainer-link", daemon=True)
        self.status: TrainerStatus | None = None
        self.error: DeltawireError | None = None
        self.alarm: SignatureError | None = None
        self.alive_at = time.monotonic()
        """When the trainer was last seen alive, by this process's clock."""
        self.secret: str | None = None
        """The secret that this worker's nonces and tasks follow from; empty if the trainer gives
        none, None while it is not known."""
        self._bucket = bucket
        self._worker = worker
        self._epoch = -1
        self._liveness = Liveness(silence_s=silence_s)
        self._closed = threading.Event()

    def run(self) -> None:
        """Polls until `close`."""
        checked_at = time.monotonic()
        while not self._closed.is_set():
            try:
                self._read()
                if (elapsed_s := time.monotonic() - checked_at) >= HEARTBEAT_S:
                    checked_at += elapsed_s
                    self._check_trainer(elapsed_s)
            except RetryError:
                checked_at = time.monotonic()
                self._closed.wait(RETRY_S)
            except DeltawireError as error:
                self.error = error
                return
            self._closed.wait(self._bucket.poll_s)

    def _read(self) -> None:
        try:
            status = read_trainer(self._bucket) or self.status
            self._read_secret(status)
        except SignatureError as error:
            self.alarm = error
        else:
            self.status, self.alarm = status, None

    def _read_secret(self, status: TrainerStatus | None) -> None:
        """Reads the secret once there are credits, and again after each start of a trainer."""
        if status is None or self._worker not in status.credits or status.epoch == self._epoch:
            return
        with contextlib.suppress(CorruptError):  # The trainer may store it again.
            self.secret = read_challenge(self._bucket, self._worker)
            self._epoch = status.epoch

    def _check_trainer(self, elapsed_s: float) -> None:
        state = self._liveness.observe(read_heartbeat(self._bucket, "trainer"), elapsed_s)
        if state == "alive":
            self.alive_at = time.monotonic()

    def raise_error(self) -> None:
        """Raises the error that ended the thread, if one did."""
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Stops the thread."""
        self._closed.set()
        if self.is_alive():
            self.join(timeout=30)

"""Reads the trainer's status and writes the worker's heartbeat."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from deltawire.errors import DeltawireError, RetryError
from deltawire.runtime.fleet import read_trainer
from deltawire.runtime.heartbeat import read_pulse
from deltawire.store import Bucket
from deltawire.wire import keys
from deltawire.wire.objects import encode_json
from deltawire.wire.status import Heartbeat, TrainerStatus

HEARTBEAT_S = 1.0


class TrainerLink(threading.Thread):
    """Keeps the latest ``trainer.json`` at hand and the worker's own heartbeat fresh.

    A store that does not answer leaves what is at hand as it was; ``error`` holds anything that
    waiting will not mend.
    """

    def __init__(self, bucket: Bucket, beat: Callable[[], Heartbeat]) -> None:
        super().__init__(name="liaison", daemon=True)
        self.status: TrainerStatus | None = None
        self.error: DeltawireError | None = None
        self.heard_at = time.monotonic()
        """When the trainer last gave a sign of life that was new, by this process's clock."""
        self._heard = (0.0, -1)
        self._bucket = bucket
        self._beat = beat
        self._closed = threading.Event()

    def run(self) -> None:
        """The thread itself."""
        beaten = float("-inf")
        while not self._closed.is_set():
            try:
                self.status = read_trainer(self._bucket) or self.status
                if time.monotonic() - beaten >= HEARTBEAT_S:
                    self.beat_now()
                    beaten = time.monotonic()
                    self._listen()
            except RetryError:
                self._closed.wait(1.0)
            except DeltawireError as error:
                self.error = error
                return
            self._closed.wait(self._bucket.poll_s)

    def _listen(self) -> None:
        pulse = read_pulse(self._bucket, "trainer")
        sign = (
            self.status.at if self.status else 0.0,
            pulse.beat if pulse is not None and not pulse.stuck else self._heard[1],
        )
        if sign != self._heard:
            self._heard, self.heard_at = sign, time.monotonic()

    def beat_now(self) -> None:
        """Write the heartbeat."""
        beat = self._beat()
        self._bucket.put(keys.heartbeat(beat.worker), encode_json(beat))

    def close(self) -> None:
        """Stop."""
        self._closed.set()
        if self.is_alive():
            self.join(timeout=30)

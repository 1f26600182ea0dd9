"""Maintenance: compacts streams and deletes what is old, in the background."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping

from deltawire.config.retention import RetainConfig
from deltawire.errors import DeltawireError
from deltawire.live.compaction.compactor import StreamCompactor
from deltawire.live.compaction.stream_rows import ServedRows
from deltawire.store import Bucket
from deltawire.wire.compacted import Stream

COMPACT_EVERY_S = 60.0
EXPIRE_EVERY_S = 6 * 3600.0
DAY_S = 86400.0
_LOG = logging.getLogger("deltawire.live")


def days_of(retain: RetainConfig) -> dict[Stream, float]:
    """Returns for how many days the rows of each stream are kept; 0 keeps everything."""
    return {"captures": retain.captures_days, "feedback": retain.feedback_days}


def gateway_compactors(bucket: Bucket, gateway: str) -> list[StreamCompactor]:
    """Returns what compacts the streams of a gateway."""
    streams: tuple[Stream, ...] = ("captures", "feedback")
    return [StreamCompactor(bucket, ServedRows(stream), gateway) for stream in streams]


class MaintenanceThread(threading.Thread):
    """Compacts each minute, and deletes what is older than ``days`` four times a day, until
    `close`. ``compacted`` and ``expired`` count objects that were made and rows that were deleted;
    ``alarm`` holds the last error: nothing is deleted or replaced for it.

    Example::

        thread = MaintenanceThread(gateway_compactors(bucket, "g0"), days_of(config.retain))
        thread.start()
    """

    def __init__(
        self, compactors: Collection[StreamCompactor], days: Mapping[Stream, float]
    ) -> None:
        super().__init__(name="live-maintenance", daemon=True)
        self.alarm = ""
        self.compacted = 0
        self.expired = 0
        self._compactors = list(compactors)
        self._days = days
        self._expired_at = float("-inf")
        self._closing = threading.Event()

    def run(self) -> None:
        """Compacts and deletes until `close`."""
        while not self._closing.wait(COMPACT_EVERY_S):
            self.turn()

    def turn(self) -> None:
        """Compacts what is due; deletes what is old if the last time was hours ago."""
        alarm = ""
        expires = time.monotonic() - self._expired_at >= EXPIRE_EVERY_S
        for one in self._compactors:
            if self._closing.is_set():
                return
            try:
                self.compacted += one.compact()
                days = self._days.get(one.stream, 0.0)
                if expires and days:
                    self.expired += one.expire(time.time() - days * DAY_S)
                alarm = alarm or one.alarm
            except DeltawireError as error:
                alarm = alarm or error.message
                expires = False
        if expires:
            self._expired_at = time.monotonic()
        if alarm and alarm != self.alarm:
            _LOG.warning("segments are not compacted: %s", alarm)
        self.alarm = alarm

    def close(self, *, within_s: float = 10.0) -> None:
        """Ends the thread. An object that is being made stays, or is made again later."""
        self._closing.set()
        if self.is_alive():
            self.join(timeout=within_s)

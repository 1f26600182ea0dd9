"""Maintenance: compacts streams and deletes what is old, in the background."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping
from functools import partial

from deltawire.config.retention import RetainConfig
from deltawire.live.compaction.compactor import StreamCompactor
from deltawire.live.compaction.lineage_rows import LineageRows, settled_below
from deltawire.live.compaction.stream_rows import ServedRows
from deltawire.store import Bucket
from deltawire.wire.compacted import Stream

COMPACT_EVERY_S = 60.0
EXPIRE_EVERY_S = 6 * 3600.0
DAY_S = 86400.0
_LOG = logging.getLogger("deltawire.live")


def days_of(retain: RetainConfig) -> dict[Stream, float]:
    """Returns for how many days the rows of each stream are kept; 0 keeps everything."""
    return {
        "captures": retain.captures_days,
        "feedback": retain.feedback_days,
        "lineage": retain.lineage_days,
    }


def gateway_compactors(bucket: Bucket, gateway: str) -> list[StreamCompactor]:
    """Returns what compacts the streams of a gateway."""
    streams: tuple[Stream, ...] = ("captures", "feedback")
    return [StreamCompactor(bucket, ServedRows(stream), gateway) for stream in streams]


def learner_compactor(bucket: Bucket, worker: str) -> StreamCompactor:
    """Returns what compacts the lineages of a learner: those of settled groups."""
    below = partial(settled_below, bucket, worker)
    return StreamCompactor(bucket, LineageRows(), worker, below=below)


class MaintenanceThread(threading.Thread):
    """Compacts each minute, and deletes what is older than ``days`` four times a day, until
    `close`. ``compacted`` and ``expired`` count objects that were made and rows that were deleted;
    ``alarm`` holds the first error of the last turn: nothing is deleted or replaced for it, and
    the other streams go on.

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
        self._expired_at = dict.fromkeys(self._compactors, float("-inf"))
        self._closing = threading.Event()

    def run(self) -> None:
        """Compacts and deletes until `close`."""
        while not self._closing.wait(COMPACT_EVERY_S):
            self.turn()

    def turn(self) -> None:
        """Compacts what is due; deletes what is old if the last time was hours ago."""
        alarm = ""
        for one in self._compactors:
            failed = ""
            for act in (self._compact, self._expire):
                if self._closing.is_set():
                    return
                try:
                    act(one)
                except Exception as error:
                    failed = failed or str(error) or repr(error)
            if failed:  # Expiry looks into compacted rows only.
                self._expired_at[one] = float("-inf")
            alarm = alarm or failed or one.alarm
        if alarm and alarm != self.alarm:
            _LOG.warning("segments are not compacted: %s", alarm)
        self.alarm = alarm

    def _compact(self, one: StreamCompactor) -> None:
        self.compacted += one.compact()

    def _expire(self, one: StreamCompactor) -> None:
        now, days = time.monotonic(), self._days.get(one.stream, 0.0)
        if days and now - self._expired_at[one] >= EXPIRE_EVERY_S:
            self.expired += one.expire(time.time() - days * DAY_S)
            self._expired_at[one] = now

    def close(self, *, within_s: float = 10.0) -> None:
        """Ends the thread. An object that is being made stays, or is made again later."""
        self._closing.set()
        if self.is_alive():
            self.join(timeout=within_s)

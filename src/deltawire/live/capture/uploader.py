"""Uploader: moves sealed segments of a spool to the bucket, in the background.

A segment is created under a key that follows from its number, so an upload that is repeated after
a crash changes nothing. While the store does not answer, segments wait; answers do not.

Users are forgotten meanwhile. So who was forgotten is read after a segment was stored, or replaced,
and before it leaves the spool: an erasure that began earlier may have listed the bucket without it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import msgspec

from deltawire.errors import CorruptError, DeltawireError, RetryError
from deltawire.live.capture.spool import Spool
from deltawire.store import Bucket
from deltawire.wire.captures import (
    MAX_SEGMENT_BYTES,
    Capture,
    Feedback,
    decode_segment,
    encode_row,
    encode_segment,
)
from deltawire.wire.objects import prepared

UPLOAD_EVERY_S = 2.0
RETRY_AT_MOST_S = 60.0
SEAL_WITHIN_S = 60.0
UNDER_WAY_S = 2.0
"""A row may come to the spool so long after the time that it states."""
_LOG = logging.getLogger("deltawire.live")


@dataclass(frozen=True)
class SpooledStream:
    """A spool, the key of each of its segments, and the type of its rows."""

    spool: Spool
    key: Callable[[str, int], str]
    kind: type[Capture] | type[Feedback]


class _Owner(msgspec.Struct):
    user: str = ""


class SpoolUploader(threading.Thread):
    """Uploads the sealed segments of several spools, oldest first, until `close`.

    ``forgotten`` reads the pseudonyms whose rows are left out. ``each_round`` is called before each
    round, and ``at_end`` once the last one has uploaded everything. ``uploaded`` counts rows, and
    ``until`` is the time, in seconds since 1970, up to which all rows were uploaded; ``alarm``
    holds the last error.
    """

    def __init__(
        self,
        bucket: Bucket,
        gateway: str,
        streams: Collection[SpooledStream],
        *,
        forgotten: Callable[[], Collection[str]] = tuple,
        each_round: Callable[[], None] = lambda: None,
        at_end: Callable[[], None] = lambda: None,
        every_s: float = UPLOAD_EVERY_S,
    ) -> None:
        super().__init__(name="live-uploader", daemon=True)
        self.uploaded = 0
        self.damaged = 0
        self.until = 0.0
        self.alarm = ""
        self._bucket = bucket
        self._gateway = gateway
        self._streams = list(streams)
        self._forgotten = forgotten
        self._each_round = each_round
        self._at_end = at_end
        self._every_s = every_s
        self._closing = threading.Event()

    def run(self) -> None:
        """Upload until `close`."""
        pause_s = self._every_s
        while not self._closing.wait(pause_s):
            pause_s = self._every_s if self.upload() else min(2 * pause_s, RETRY_AT_MOST_S)

    def upload(self) -> bool:
        """Uploads everything that was appended before; returns whether the store answered."""
        began = time.time()
        try:
            self._each_round()
            for stream in self._streams:
                stream.spool.seal().result(SEAL_WITHIN_S)
                for number in stream.spool.sealed():
                    self._move(stream, number)
        except RetryError as error:
            self._report(error.message)
            return False
        except (DeltawireError, OSError, TimeoutError) as error:
            self._report(f"cannot upload: {error}")
            return False
        self.alarm = ""
        self.until = began - UNDER_WAY_S
        return True

    def close(self, *, within_s: float = 10.0) -> None:
        """Uploads once more and ends the thread; the rest waits for the next start."""
        self._closing.set()
        last = threading.Thread(target=self._end, name="live-last-upload", daemon=True)
        if self.is_alive():
            self.join(timeout=within_s)
        last.start()
        last.join(timeout=within_s)

    def _end(self) -> None:
        if self.upload():
            try:
                self._at_end()
            except DeltawireError as error:
                self._report(error.message)

    def _move(self, stream: SpooledStream, number: int) -> None:
        key = stream.key(self._gateway, number)
        try:
            rows = stream.spool.read(number)
        except CorruptError as error:
            # A local file, which is kept under another name: nothing of it is lost.
            self.damaged += 1
            stream.spool.set_aside(number)
            self._report(error.message)
            return
        data = encode_segment(self._gateway, number, _without(rows, self._forgotten()))
        if not self._bucket.create(key, data):
            data = self._stored_before(stream, number, rows)
        while True:
            # Twice: one listing that came back short would keep a user's rows there.
            kept = _without(rows, {*self._forgotten(), *self._forgotten()})
            wanted = encode_segment(self._gateway, number, kept)
            if data == wanted:
                break
            # Looked at again afterwards: this may undo what an erasure has just replaced.
            self._bucket.put(key, wanted)
            data = wanted
        self.uploaded += len(kept)
        stream.spool.remove(number)

    def _stored_before(self, stream: SpooledStream, number: int, rows: list[bytes]) -> bytes:
        """Returns the segment that an earlier attempt stored, whose answer was lost.

        An erasure may have taken rows from it; any others are not this gateway's.
        """
        key = stream.key(self._gateway, number)
        data = self._bucket.get(key, limit=MAX_SEGMENT_BYTES)
        if data is None:
            raise RetryError("a stored segment disappeared", run=self._bucket.url, key=key)
        decode = partial(
            decode_segment,
            kind=stream.kind, gateway=self._gateway, number=number, run=self._bucket.url, key=key,
        )  # fmt: skip
        whole = encode_segment(self._gateway, number, rows)
        found, mine = ({encode_row(row) for row in decode(one)} for one in (data, whole))
        if not found <= mine:
            raise CorruptError(
                "another gateway has stored a segment in its place", run=self._bucket.url, key=key
            )
        return data

    def _report(self, message: str) -> None:
        if message != self.alarm:
            _LOG.warning("captures wait on disk: %s", message)
        self.alarm = message


def _without(rows: list[bytes], users: Collection[str]) -> list[bytes]:
    return [row for row in rows if _user_of(row) not in users] if users else rows


def _user_of(row: bytes) -> str:
    try:
        return msgspec.msgpack.decode(row, type=prepared(_Owner)).user
    except msgspec.MsgspecError:
        return ""

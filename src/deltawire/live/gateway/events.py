"""Splits a stream into its server-sent events, as bytes arrive."""

from __future__ import annotations

import re

from deltawire.errors import CorruptError

MAX_EVENT_BYTES = 16 << 20
DONE = b"[DONE]"
_END = re.compile(rb"\r?\n\r?\n")


class EventSplitter:
    """Collects bytes to whole events.

    Example::

        for event in splitter.feed(chunk):
            data_of(event)
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the events that are whole now, without the empty lines between them; raises
        `CorruptError` beyond `MAX_EVENT_BYTES`."""
        whole = self._rest + data
        parts = _END.split(whole) if b"\r" in whole else whole.split(b"\n\n")
        self._rest = parts.pop()
        if len(self._rest) > MAX_EVENT_BYTES:
            raise CorruptError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return [part for part in parts if part]

    @property
    def rest(self) -> bytes:
        """The bytes of an event that has not ended."""
        return self._rest


def data_of(event: bytes) -> bytes:
    """Returns an event's data; empty for a comment."""
    if event.startswith(b"data:") and b"\n" not in event:
        return event[5:].strip()
    lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines)

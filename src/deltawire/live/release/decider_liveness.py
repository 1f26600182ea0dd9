"""Decider's liveness: says in the bucket that decisions are taken, for views."""

from __future__ import annotations

import socket
import sys
import time

from deltawire.display import safe_line
from deltawire.errors import DeltawireError
from deltawire.store import Bucket
from deltawire.wire import keys
from deltawire.wire.decider_state import DeciderState
from deltawire.wire.objects import encode_json

STATE_EVERY_S = 15.0


class DeciderLiveness:
    """Stores that a decider of a run is alive, every `STATE_EVERY_S` at most. A store that takes
    none keeps it from deciding nothing.

    Example::

        liveness = DeciderLiveness(bucket, run.id, by="ann")
        liveness.beat()
        liveness.end()
    """

    def __init__(self, bucket: Bucket, run: str, *, by: str) -> None:
        self._bucket, self._run, self._by = bucket, run, by
        self._next_at = float("-inf")
        self._fault = ""

    def beat(self, *, alarm: str = "") -> None:
        """Says that it looked now; ``alarm`` is what keeps it from measuring versions."""
        if time.monotonic() >= self._next_at:
            self._next_at = time.monotonic() + STATE_EVERY_S
            self._store(alarm=alarm, ended=False)

    def end(self) -> None:
        """Says that it was stopped."""
        self._store(alarm="", ended=True)

    def _store(self, *, alarm: str, ended: bool) -> None:
        state = DeciderState(
            run=self._run,
            by=self._by,
            host=socket.gethostname()[:256],
            at=time.time(),
            alarm=alarm[:1024],
            ended=ended,
        )
        try:
            self._bucket.put(keys.LIVE_DECIDER, encode_json(state))
        except DeltawireError as error:
            if error.message != self._fault:
                words = f"cannot say that it is alive: {error.message}"
                print(safe_line(words), file=sys.stderr)  # noqa: T201
            self._fault = error.message
        else:
            self._fault = ""

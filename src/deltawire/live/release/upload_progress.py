"""Upload progress: up to which time all gateways have uploaded their rows.

An outcome is complete once every report of its time is in the bucket. A gateway that was cut off
from the bucket keeps reports on its disk and uploads them later, so no clock of this machine tells
that: gateways state it themselves, in ``live/gateways/<gateway>.json``.
"""

from __future__ import annotations

from deltawire.errors import CorruptError
from deltawire.store import Bucket
from deltawire.wire import keys
from deltawire.wire.captures import MAX_GATEWAY_BYTES, GatewayState
from deltawire.wire.objects import decode_json

GONE_S = 3600.0
"""A gateway that has stated nothing for so long is not waited for any more."""


def complete_until(bucket: Bucket, now: float) -> float:
    """Returns the time, in seconds since 1970 and at most ``now``, up to which all rows of all
    gateways are in the bucket. Raises `RetryError`.

    A gateway that ended has uploaded everything. Those of earlier releases state nothing, and count
    up to their last state. A state that cannot be read is waited for: nothing is complete.
    """
    until = now
    for key in bucket.list(keys.LIVE_GATEWAYS):
        try:
            data = bucket.get(key, limit=MAX_GATEWAY_BYTES)
            if data is None:
                continue
            state = decode_json(data, GatewayState, run=bucket.url, key=key)
        except CorruptError:
            # Nothing settles, and nothing is decided, until the gateway has stated it again.
            return 0.0
        if state.ended or state.at < now - GONE_S:
            continue
        stated = state.at if state.uploaded_until is None else state.uploaded_until
        until = min(until, stated)
    return until

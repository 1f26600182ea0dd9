"""The closed form of a start with nothing: the newest anchor, and the deltas since.

All readers of a region at once are a cold start, one reader while the others hold the version is a
late joiner. Both fetch their share of the newest anchor, and on average half of the deltas between
two anchors; they decode each of these over all of their values. Requests for an anchor are counted
as if every one had 8 MiB, or one for each matrix of which a rank has rows, so times are at least
what is stated.
"""

from __future__ import annotations

import math

import msgspec

from deltawire.plan.fleet.rates import Precision
from deltawire.plan.fleet.transfer import Amounts, Readers
from deltawire.store import REQUESTS
from deltawire.store.ranges import REQUEST_BYTES
from deltawire.sync.publish.encoding import BLOB_BYTES

ANCHOR_SHARE: dict[Precision, float] = {"bf16": 0.66, "fp8": 0.82}
"""Bytes of an anchor over those of the model, measured for normally distributed weights; the
exponents are coded, the other bits are not."""
START_READS, START_LISTINGS = 2, 3
"""Requests of a reader that starts, before the first blob and without a manifest for each delta."""


class ColdStart(msgspec.Struct, frozen=True, kw_only=True):
    """A start of a region's readers: of all at once, and of one that joins late.

    ``bytes`` and ``requests`` are those of all readers, ``deltas`` how many follow the anchor.

    Example::

        cold_start(amounts, readers, precision="fp8", matrices=70_000, deltas=24.5).seconds
    """

    seconds: float
    late_joiner_s: float
    bytes: float
    requests: float
    deltas: float


def cold_start(
    amounts: Amounts, readers: Readers, *, precision: Precision, matrices: int, deltas: float
) -> ColdStart:
    """Returns a cold start from an anchor and so many later ``deltas``; a reader has rows of so
    many ``matrices`` and its share of the others."""
    share = readers.fetched_share
    anchor = ANCHOR_SHARE[precision] * amounts.model_bytes
    blobs = math.ceil(anchor / BLOB_BYTES)
    touched = min(blobs, blobs * share + matrices)
    whole = max(anchor * share / REQUEST_BYTES, touched)
    fetching = readers.fetching(amounts)
    reads = START_READS + whole + deltas * (fetching.requests + (1 if amounts.inline else 3))
    size = anchor * share + deltas * (
        fetching.bytes + amounts.manifest_bytes * (1 if amounts.inline else share)
    )
    requests = reads + START_LISTINGS

    def seconds(on_host: int, in_region: int) -> float:
        rate = min(
            REQUESTS * readers.connection_bytes_s,
            readers.link_bytes_s / on_host,
            readers.region_bytes_s / in_region,
        )
        transfer_s = max(size / rate, requests * in_region / readers.reads_per_s)
        waves = START_LISTINGS + 2 + requests / REQUESTS
        changed = readers.decode.seconds(amounts.values * share, amounts.changes * share)
        decode_s = readers.decode.seconds(amounts.values * share, 0.0) + deltas * changed
        decode_s *= on_host / readers.cores
        # Blobs are fetched while others are decoded, and there are many of them.
        return max(transfer_s, decode_s, waves * readers.get_s)

    return ColdStart(
        seconds=seconds(min(readers.per_host, readers.count), readers.count),
        late_joiner_s=seconds(1, 1),
        bytes=size * readers.count,
        requests=requests * readers.count,
        deltas=deltas,
    )

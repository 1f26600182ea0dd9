"""Counts the requests of an erasure after a month of three gateways.

Each gateway stores a segment of captures and one of feedback every two seconds, as in steady
traffic. The newest segments are compacted by the compactor; the objects of the weeks before are
laid out as it leaves them, with fewer rows in each. The user asked once a day, so the answers lie
in objects of all ages.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.training.keys import Measured, Options
from deltawire.errors import BugError
from deltawire.live.compaction.compactor import FAN_IN, StreamCompactor
from deltawire.live.compaction.storing import store_compacted
from deltawire.live.compaction.stream_rows import ServedRows
from deltawire.live.erasure.forgetting import forget_user
from deltawire.store import Bucket, open_bucket
from deltawire.testing.simulated import SimulatedBucket
from deltawire.testing.tiny import start_run
from deltawire.wire import keys
from deltawire.wire.captures import Capture, Feedback, encode_row, encode_segment
from deltawire.wire.compacted import NumberedRow, Stream

GATEWAYS = ("g0", "g1", "g2")
STREAMS: tuple[Stream, ...] = ("captures", "feedback")
SEGMENT_S = 2.0
DAYS = 30
SEGMENTS = int(DAYS * 86400 / SEGMENT_S)
LEVELS = (FAN_IN**4, FAN_IN**3, FAN_IN**2)
"""Segments in the objects that are laid out, the largest first."""
ROWS = 64
"""Rows of an object that is laid out: a request costs the same whatever their number."""
USER = "a" * 32
USER_EVERY = int(86400 / SEGMENT_S)


def measure(options: Options) -> Measured:
    """Counts the requests of an erasure, with compaction and for what it would be without."""
    del options
    bucket, answers = month()
    counted = SimulatedBucket(bucket, latency_s=0.0)
    started = time.perf_counter()
    record = forget_user(counted, start_run(bucket), USER)
    if (record.answers, record.feedback) != (answers, answers):
        raise BugError(f"the erasure found {record.answers} answers of {answers}")
    facts: dict[str, Any] = {
        "requests": counted.total_requests,
        "by_verb": dict(counted.requests),
        "seconds": time.perf_counter() - started,
        "objects": len(bucket.list(keys.LIVE)),
        "segments": len(GATEWAYS) * len(STREAMS) * SEGMENTS,
        "answers": answers,
    }
    return Measured({"forget_requests_month_rows": counted.total_requests}, facts)


def month() -> tuple[Bucket, int]:
    """Returns a bucket after a month, and how many answers of the user are in it."""
    bucket = open_bucket("memory://")
    start_run(bucket)
    for stream in STREAMS:
        for owner in GATEWAYS:
            lay_out(bucket, stream, owner)
            StreamCompactor(bucket, ServedRows(stream), owner).compact()
    each = sum(is_the_users(number) for number in range(SEGMENTS))
    return bucket, len(GATEWAYS) * each


def lay_out(bucket: Bucket, stream: Stream, owner: str) -> None:
    """Stores a month of one stream; the last minutes as segments."""
    first = 0
    for span in LEVELS:
        while SEGMENTS - first > span + FAN_IN:
            inside = range(first, first + span)
            step = max(span // ROWS, 1)
            numbers = {*inside[::step], inside[-1], *filter(is_the_users, inside)}
            rows = [NumberedRow(n, row_of(stream, owner, n)) for n in sorted(numbers)]
            store_compacted(bucket, ServedRows(stream), owner, rows)
            first += span
    for number in range(first, SEGMENTS):
        data = encode_segment(owner, number, [row_of(stream, owner, number)])
        bucket.put(f"{keys.live_segments(stream, owner)}{number:010d}", data)


def is_the_users(number: int) -> bool:
    """Returns whether the user asked during this segment."""
    return number % USER_EVERY == USER_EVERY // 2


def row_of(stream: Stream, owner: str, number: int) -> bytes:
    """Returns the row of a segment."""
    answer = f"{GATEWAYS.index(owner):02x}{number:030x}"
    user = USER if is_the_users(number) else answer
    at = number * SEGMENT_S
    if stream == "captures":
        tokens = number.to_bytes(4, "little")
        return encode_row(
            Capture(
                answer=answer, conversation=answer, turn=0, user=user, arm="serving",
                propensity=1.0, at=at, receipt="", prompt=tokens, tokens=tokens,
                logprobs=bytes(4), spans=[(0, 1)],
            )
        )  # fmt: skip
    return encode_row(
        Feedback(
            id="r", answer=answer, conversation=answer, user=user, arm="serving", kind="accept",
            value=1.0, at=at, received=at, served_at=at,
        )
    )  # fmt: skip

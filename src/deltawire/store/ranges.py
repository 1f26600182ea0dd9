"""Plans the requests that read parts of one object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

NEAR_BYTES = 64 << 10
"""Ranges no further apart than this are read together: at 90 MB/s, which one connection to S3
reaches, the bytes between take 0.7 ms, much less than another request."""

REQUEST_BYTES = 8 << 20
"""Requests are not joined beyond this size, so that a large object is read over several
connections."""

AT_ONCE = 8
"""The most ranges of one object that are requested at once."""


@dataclass
class RangeRequest:
    """One request: ``length`` bytes from ``start`` on, which hold the ranges numbered ``ranges``.

    Example::

        request = RangeRequest(0, 100, [0, 1])
    """

    start: int
    length: int
    ranges: list[int] = field(default_factory=list)


def range_requests(ranges: Sequence[tuple[int, int]]) -> list[RangeRequest]:
    """Returns the requests that together read every ``(start, length)``, in ascending order.

    Neighboring ranges share a request (`NEAR_BYTES`) as long as it stays within `REQUEST_BYTES`; a
    larger range is a request by itself.
    """
    requests: list[RangeRequest] = []
    for number in sorted(range(len(ranges)), key=lambda one: ranges[one]):
        start, length = ranges[number]
        last = requests[-1] if requests else None
        if last is not None:
            end = max(last.start + last.length, start + length)
            inside = start + length <= last.start + last.length
            near = start - (last.start + last.length) <= NEAR_BYTES
            if inside or (near and end - last.start <= REQUEST_BYTES):
                last.length = end - last.start
                last.ranges.append(number)
                continue
        requests.append(RangeRequest(start, length, [number]))
    return requests

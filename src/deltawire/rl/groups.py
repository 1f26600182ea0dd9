"""Reading one finished group, believed damaged only when it is so each time it is read."""

from __future__ import annotations

import blake3

from deltawire.errors import CorruptError
from deltawire.store import Bucket
from deltawire.wire import keys
from deltawire.wire.ledger import GROUP_HASH_DIGITS
from deltawire.wire.rollouts import MAX_GROUP_BYTES, Group, decode_group

READS = 3
"""A network may cut an answer short and call it whole. A group that is dropped for it is lost."""


def read_group(
    bucket: Bucket, worker: str, sequence: int, *, vocabulary: int | None = None, expected: str = ""
) -> tuple[Group, str] | None:
    """A worker's group and the hash of its bytes, None if there is none.

    Raises `CorruptError` if it is no group, another worker's, holds a token beyond ``vocabulary``,
    or is not the one whose hash is ``expected``.
    """
    for attempt in range(READS):
        try:
            return _read_once(bucket, worker, sequence, vocabulary, expected)
        except CorruptError:
            if attempt == READS - 1:
                raise
    return None


def _read_once(
    bucket: Bucket, worker: str, sequence: int, vocabulary: int | None, expected: str
) -> tuple[Group, str] | None:
    key = keys.rollout(worker, sequence)
    data = bucket.get(key, limit=MAX_GROUP_BYTES)
    if data is None:
        return None
    found = blake3.blake3(data).hexdigest()[:GROUP_HASH_DIGITS]
    fault = ""
    if expected and found != expected:
        fault = "a group is not the one that was trained on"
    else:
        group = decode_group(data, run=bucket.url, key=key)
        if group.worker != worker:
            fault = "a group of another worker"
        elif vocabulary is not None and group.largest_token >= vocabulary:
            fault = "a token no model has"
        else:
            return group, found
    raise CorruptError(fault, run=bucket.url, key=key)

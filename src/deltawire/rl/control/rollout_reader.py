"""Reading one finished group, believed damaged only when it is so each time it is read."""

from __future__ import annotations

from dataclasses import dataclass

import blake3

from deltawire.errors import CorruptError
from deltawire.store import Bucket
from deltawire.wire import keys
from deltawire.wire.ledger import GROUP_HASH_DIGITS
from deltawire.wire.rollouts import MAX_GROUP_BYTES, Group, decode_group

READS = 3
"""A network may cut an answer short and call it whole. A group that is dropped for it is lost."""


@dataclass(frozen=True)
class Bounds:
    """What each group of a run keeps to: tokens of the model's, the run's own temperature, and no
    more tokens in a row than its context. One that does not is worse than useless: it would end
    the trainer, or spoil the step of all that it is computed with."""

    vocabulary: int
    temperature: float
    context: int

    def fault(self, group: Group) -> str:
        """What is wrong with a group, empty if nothing is."""
        if group.largest_token >= self.vocabulary:
            return "a token no model has"
        if group.temperature != self.temperature:
            return f"drawn at the temperature {group.temperature}, not {self.temperature}"
        for _, _, t in group.trained():
            if len(group.prompt_of(t)) + len(t.tokens_T) > self.context:
                return f"a sequence of more than {self.context} tokens"
        return ""


def read_group(
    bucket: Bucket, worker: str, sequence: int, *, bounds: Bounds | None = None, expected: str = ""
) -> tuple[Group, str] | None:
    """A worker's group and the hash of its bytes, None if there is none.

    Raises `CorruptError` if it is no group, another worker's, beyond its ``bounds``, or is not the
    one whose hash is ``expected``.
    """
    for attempt in range(READS):
        try:
            return _read_once(bucket, worker, sequence, bounds, expected)
        except CorruptError:
            if attempt == READS - 1:
                raise
    return None


def _read_once(
    bucket: Bucket, worker: str, sequence: int, bounds: Bounds | None, expected: str
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
        elif bounds is not None:
            fault = bounds.fault(group)
        if not fault:
            return group, found
    raise CorruptError(fault, run=bucket.url, key=key)

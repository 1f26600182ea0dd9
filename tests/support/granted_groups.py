"""Groups that a test makes up, with the nonces that a trainer grants to their worker."""

from __future__ import annotations

from dataclasses import replace

from deltawire.rl.control.challenges import nonce_of
from deltawire.store import Bucket
from deltawire.wire import keys
from deltawire.wire.objects import encode_json
from deltawire.wire.rollouts import Group, encode_group
from deltawire.wire.status import Challenge

SECRET = "5e" * 16
UNCHECKED = {"rescore_share": 0.0}
"""For ``[trust]``: made-up rewards and log-probabilities would not agree with the trainer's."""


def put_group(bucket: Bucket, number: int, group: Group, *, worker: str = "w0") -> bytes:
    """Store a group as the worker's ``number``-th, under its first lease; returns its bytes."""
    if number == 0 or bucket.get(keys.challenge(worker), limit=4096) is None:
        bucket.put(keys.challenge(worker), encode_json(Challenge(worker=worker, secret=SECRET)))
    data = encode_group(replace(group, nonce=nonce_of(SECRET, 0, number)))
    bucket.put(keys.rollout(worker, number), data)
    return data

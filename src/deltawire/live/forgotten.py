"""Reads which users were forgotten or readmitted; gateways, learners and erasures all ask here."""

from __future__ import annotations

from deltawire.store import Bucket
from deltawire.wire import keys


def forgotten_users(bucket: Bucket) -> frozenset[str]:
    """Returns the pseudonyms of the users of whom a record of an erasure exists; raises
    `RetryError`.

    A process that stores a user's data and then calls this misses no erasure: an erasure creates
    its record first and lists what is stored afterwards. So it finds the data, or the record is
    here.
    """
    names = (key.rsplit("/", 1)[-1] for key in bucket.list(keys.LIVE_FORGOTTEN))
    return frozenset(name.removesuffix(".json") for name in names)


def readmitted_users(bucket: Bucket) -> frozenset[str]:
    """Returns the pseudonyms of forgotten users who may be stored again under their next one;
    raises `RetryError`."""
    names = (key.rsplit("/", 1)[-1] for key in bucket.list(keys.LIVE_READMITTED))
    return frozenset(name.removesuffix(".json") for name in names)

"""Challenges: a secret for each worker, from which the nonce and the task of each group follow.

The trainer draws a secret when a worker first appears and stores it in
``challenges/<worker>.json``, which only that worker and the trainer need to read. The worker
numbers the groups that it starts under one lease; the nonce of a group is a keyed hash of lease and
number, and the trainer says which task belongs to the number (`deltawire.rl.control.draws`). So a
group is valid for one worker and one number:

- Without the secret, no one can deliver in the worker's name.
- A worker does not choose its tasks.
- A number that was delivered already, and any group from before the secret, is a replay.

A worker can still withhold a group, which costs it a credit.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Collection

from deltawire.errors import CorruptError
from deltawire.store import Bucket
from deltawire.store.parallel import in_parallel
from deltawire.wire import keys
from deltawire.wire.objects import decode_json, encode_json
from deltawire.wire.status import MAX_STATUS_BYTES, Challenge

_NONCE = re.compile(r"([0-9a-f]{1,12})-([0-9a-f]{1,12})-([0-9a-f]{24})")
REMEMBERED = 1024
"""Numbers below the largest of a lease that are still told apart; older ones count as replayed."""
MOST_WORKERS = 16_384
"""The most workers that have a secret at a time. A heartbeat costs its writer nothing, and each
name would cost the trainer an object."""


def nonce_of(secret: str, lease: int, number: int) -> str:
    """The nonce of the ``number``-th group that a worker starts under ``lease``."""
    content = f"{lease}/{number}".encode()
    mac = hashlib.blake2b(content, key=bytes.fromhex(secret), digest_size=12).hexdigest()
    return f"{lease:x}-{number:x}-{mac}"


def stream_of(worker: str, secret: str, lease: int) -> str:
    """The stream of tasks that a worker draws from under ``lease`` if the trainer gives it no
    draws."""
    return f"{worker}-{secret}-{lease}"


def numbers_in(nonce: str) -> tuple[int, int] | None:
    """Lease and number that a nonce states; None if it was not made from a challenge."""
    found = _NONCE.fullmatch(nonce)
    return (int(found[1], 16), int(found[2], 16)) if found else None


def read_challenge(bucket: Bucket, worker: str) -> str:
    """The secret that the trainer gave a worker, empty if there is none; raises `CorruptError`."""
    key = keys.challenge(worker)
    data = bucket.get(key, limit=MAX_STATUS_BYTES)
    return decode_json(data, Challenge, run=bucket.url, key=key).secret if data else ""


class Challenges:
    """The trainer's secrets, and the numbers that were delivered.

    Example::

        challenges.ensure({"w0"})
        fault = challenges.fault("w0", group.nonce, granted=12)
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._secrets: dict[str, str] = {}
        self._seen: dict[str, dict[int, set[int]]] = {}
        """By worker and lease, the numbers that were delivered."""

    def ensure(self, workers: Collection[str], *, first: Collection[str] = ()) -> set[str]:
        """Gives a secret to each worker that has none, those in ``first`` before others.

        All of them at once, because the first workers with a secret would hold all credits. Returns
        the workers that have none because `MOST_WORKERS` have one; they get one when others leave.
        Raises `RetryError`.
        """
        new = sorted(workers - self._secrets.keys(), key=lambda name: (name not in first, name))
        room = max(0, MOST_WORKERS - len(self._secrets))
        given = new[:room]
        self._secrets |= zip(given, in_parallel(self._bucket, self._secret, given), strict=True)
        return set(new[room:])

    def _secret(self, worker: str) -> str:
        """Reads a worker's secret, or stores a new one."""
        try:
            secret = read_challenge(self._bucket, worker)
        except CorruptError:
            secret = ""
        if not secret:
            secret = secrets.token_hex(16)
            stored = encode_json(Challenge(worker=worker, secret=secret))
            self._bucket.put(keys.challenge(worker), stored)
        return secret

    def secret_of(self, worker: str) -> str:
        """The secret of a worker, empty if it has none."""
        return self._secrets.get(worker, "")

    def fault(self, worker: str, nonce: str, *, granted: int) -> str:
        """Explains why a group with this nonce is not one of the worker's. If it is, remembers it
        and returns an empty string. ``granted`` is the number of groups that the worker may have
        started."""
        found, secret = numbers_in(nonce), self._secrets.get(worker, "")
        if (
            found is None
            or not secret
            or not secrets.compare_digest(nonce, nonce_of(secret, *found))
        ):
            return "the nonce does not belong to a group that this worker was granted"
        lease, number = found
        if number >= granted:
            return f"group {number} was started, and {granted} were granted"
        leases = self._seen.setdefault(worker, {})
        seen = leases.setdefault(lease, set())
        if number in seen or number < max(seen, default=0) - REMEMBERED:
            return f"group {number} was delivered before"
        seen.add(number)
        if len(seen) > 2 * REMEMBERED:
            leases[lease] = {n for n in seen if n >= max(seen) - REMEMBERED}
        return ""

    @staticmethod
    def numbers(nonce: str) -> tuple[int, int]:
        """Lease and number of a nonce that `fault` accepted."""
        return numbers_in(nonce) or (0, 0)

    def forget(self, worker: str, *, granted: int) -> None:
        """Drops the numbers of a worker that has left.

        Its secret stays in the bucket if it was granted groups, which may still be checked; else
        the object is deleted. Raises `RetryError`.
        """
        if self._secrets.pop(worker, "") and not granted:
            self._bucket.delete(keys.challenge(worker))
        self._seen.pop(worker, None)

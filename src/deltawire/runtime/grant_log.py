"""Log of grants: every key that a role of a signed run was given, in order, signed by the owner.

``roles/<role>.json`` says which key signs now. The log, ``roles/<role>/<number>.json``, says which
keys signed before: what the gateways decided and stored with an earlier key stays valid, so a new
key brings no rolled-back version back and hides nothing from an erasure. An earlier key signs
nothing new: a decision counts only below the number of decisions that the next grant states, and
any other object only if it was signed before that grant. A grant that revokes ends all keys before.

Each entry has the hash of the one before. A log that was cut or deleted makes earlier signatures
void, as if there were none: it never makes a key valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from blake3 import blake3

from deltawire.errors import SignatureError
from deltawire.store import Bucket
from deltawire.wire import keys
from deltawire.wire.roles import (
    MAX_GRANT_BYTES,
    RoleGrant,
    Trust,
    decode_grant,
    encode_grant,
)
from deltawire.wire.seal import Signer

MAX_GRANTS = 1024
"""The most grants of one role that are read."""


class EarlierKey(NamedTuple):
    """A key that a role was given before, and what it may have signed."""

    public_key: str
    until: float
    """When the next key was granted, in seconds since 1970."""
    decisions: int
    """The number of decisions at that time."""

    def signs(self, key: str, signed_at: float) -> bool:
        """Returns whether an object that this key signed then still counts."""
        if key.startswith(keys.LIVE_DECISIONS):
            number = keys.trailing_number(key)
            return number is not None and number < self.decisions
        return signed_at < self.until


def read_grants(bucket: Bucket, role: str, *, trust: Trust) -> list[RoleGrant]:
    """Returns the logged grants of a role, the oldest first; none if the log was changed.

    Raises `RetryError` if the store does not answer, and `CorruptError` for a damaged entry.
    """
    found: list[RoleGrant] = []
    previous = ""
    while len(found) < MAX_GRANTS:
        key = keys.grant(role, len(found))
        data = bucket.get(key, limit=MAX_GRANT_BYTES)
        if data is None:
            break
        grant = decode_grant(data, role, trust=trust, key=key)
        if grant.previous != previous:
            raise SignatureError(
                "the log of grants was changed: an entry does not follow the one before",
                run=bucket.url,
                key=key,
            )
        found.append(grant)
        previous = blake3(data).hexdigest()
    return found


def log_grant(
    bucket: Bucket, grant: RoleGrant, before: RoleGrant | None, *, signer: Signer, trust: Trust
) -> None:
    """Appends a grant to its role's log, and first ``before`` if the log does not end with it.

    A grant of a release without a log enters it with the next one. Two that append at once leave
    both entries.
    """
    while True:
        known = read_grants(bucket, grant.role, trust=trust)
        if known and known[-1].public_key == grant.public_key:
            return
        entry = grant
        if before is not None and all(one.public_key != before.public_key for one in known):
            entry = before
        key, previous = keys.grant(grant.role, len(known)), ""
        if known:
            last = bucket.get(keys.grant(grant.role, len(known) - 1), limit=MAX_GRANT_BYTES)
            previous = blake3(last or b"").hexdigest()
        bucket.create(key, encode_grant(_after(entry, previous), signer=signer, key=key))


def earlier_keys(grants: Sequence[RoleGrant], now: RoleGrant) -> list[EarlierKey]:
    """Returns the keys that a role had before ``now``, without those that a later grant revoked."""
    series = [one for one in grants if one.granted_at < now.granted_at] + [now]
    kept: list[EarlierKey] = []
    for grant, following in pairwise(series):
        kept.append(EarlierKey(grant.public_key, following.granted_at, following.decisions))
        if following.revokes:
            kept.clear()
    return kept


def _after(grant: RoleGrant, previous: str) -> RoleGrant:
    return RoleGrant(
        run=grant.run,
        role=grant.role,
        public_key=grant.public_key,
        granted_at=grant.granted_at,
        decisions=grant.decisions,
        revokes=grant.revokes,
        previous=previous,
    )

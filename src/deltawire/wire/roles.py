"""Role keys of a signed run: who may sign which object, for which run, and how long ago.

The run's owner grants one key to each role in a separate object, ``roles/<role>.json``. The role's
objects are then signed by that key, name the role in their seal, and state the run and the time of
signing. An unsigned run has none of this, and its objects have no seal.

Example::

    data = sign_json(status, run_id=run.id, key=keys.TRAINER, signer=signer, role=TRAINER_ROLE)
    trust = Trust(run.id, run.public_key, {TRAINER_ROLE: grant.public_key}, verify, run=bucket.url)
    status = open_json(data, TrainerStatus, trust=trust, key=keys.TRAINER, role=TRAINER_ROLE)
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
from blake3 import blake3

from deltawire.errors import CorruptError, InputError
from deltawire.wire import keys
from deltawire.wire.objects import FORMAT, check_members, decode_json
from deltawire.wire.run import Hash, Identity, PublicKey, Run, Size
from deltawire.wire.seal import (
    OWNER,
    Signer,
    Verifier,
    check_seal,
    check_signature,
    seal,
    seal_json,
    unseal,
)

T = TypeVar("T", bound=msgspec.Struct)

TRAINER_ROLE = "trainer"
MAX_GRANT_BYTES = 1 << 12
CLOCKS_DIFFER_S = 300.0
"""How far in the future a time of signing may lie."""

_PIN = re.compile(r"([0-9a-f]{64})(?::([0-9a-f]{32}))?")


def worker_role(worker: str) -> str:
    """The role in which a worker signs its heartbeats and groups."""
    return f"worker-{worker}"


class RoleGrant(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="format", tag=FORMAT
):
    """The object at ``roles/<role>.json``: the key that may sign in ``role``."""

    run: Identity
    role: str
    public_key: PublicKey


class _Claims(msgspec.Struct):
    run: str
    signed_at: float


class _Content(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="format", tag=FORMAT
):
    run: Identity
    signed_at: float
    bytes: Size
    content: Hash


@dataclass(frozen=True)
class Pin:
    """The public key, and perhaps the run, that a reader insists on."""

    public_key: str
    run_id: str = ""

    @classmethod
    def parse(cls, text: str) -> Pin:
        """``<public key>`` or ``<public key>:<run id>``; raises `InputError` for anything else."""
        found = _PIN.fullmatch(text)
        if found is None:
            raise InputError(
                f"{text[:120]!r} is no public key",
                hint="give the 64 hexadecimal digits that deltawire keygen prints, and to insist "
                "on one run a colon and its id",
            )
        return cls(found[1], found[2] or "")

    def check(self, table: Run, *, run: str) -> None:
        """Raise `CorruptError` unless ``table`` is the run that is pinned."""
        if table.public_key != self.public_key:
            raise CorruptError(
                "the run is signed by another key" if table.public_key else "the run is not signed",
                hint="is it the run that the public key belongs to?",
                run=run,
                key=keys.RUN,
            )
        if self.run_id and table.id != self.run_id:
            raise CorruptError(
                f"the run has the id {table.id}, not {self.run_id}",
                hint="somebody has put another run of the same owner here",
                run=run,
                key=keys.RUN,
            )


@dataclass(frozen=True)
class Trust:
    """The facts that a reader checks a run's objects against: the run's id, its owner's public key
    (empty if unsigned), the keys granted to roles, and how to verify a signature."""

    run_id: str
    owner: str
    grants: Mapping[str, str] = field(default_factory=dict)
    verify: Verifier | None = None
    run: str = ""
    """The bucket's URL, for messages."""

    def key_of(self, role: str, *, key: str) -> str:
        """The public key of a role; raises `CorruptError` if none was granted."""
        found = self.owner if role == OWNER else self.grants.get(role)
        if found is None:
            raise CorruptError(
                f"no key is granted to the role {role!r}",
                hint="the owner of the run's key must grant one",
                run=self.run,
                key=key,
            )
        return found


def encode_grant(grant: RoleGrant, *, signer: Signer) -> bytes:
    """Encodes the object at `keys.role`, signed by the run's owner."""
    return seal(grant, key=keys.role(grant.role), signer=signer)


def decode_grant(data: bytes, role: str, *, trust: Trust) -> RoleGrant:
    """Parse a grant and check that the run's owner gave it; raises `CorruptError`."""
    key = keys.role(role)
    grant = unseal(data, RoleGrant, run=trust.run, key=key, what="grant")
    _check_signed(data, trust, key, OWNER)
    if (grant.run, grant.role) != (trust.run_id, role):
        raise CorruptError("a grant of another run or role", run=trust.run, key=key)
    return grant


def sign_json(
    value: msgspec.Struct,
    *,
    run_id: str,
    key: str,
    signer: Signer,
    role: str,
    now: float | None = None,
) -> bytes:
    """The sealed object that holds ``value`` for ``key``, signed in ``role``, with the members
    ``run`` and ``signed_at``."""
    members = msgspec.to_builtins(value)
    members |= {"format": FORMAT, "run": run_id, "signed_at": time.time() if now is None else now}
    return seal_json(msgspec.json.encode(members), key=key, signer=signer, role=role)


def open_json(
    data: bytes,
    kind: type[T],
    *,
    trust: Trust,
    key: str,
    role: str,
    max_age_s: float | None = None,
    now: float | None = None,
) -> T:
    """Decode an object that `sign_json` made, or a plain one if the run is not signed.

    Raises `CorruptError` for one that was signed in another role, by another key, for another key
    of the bucket or another run, or longer than ``max_age_s`` ago.
    """
    what = kind.__name__.lower()
    if trust.owner:
        check_seal(data, what, run=trust.run, key=key)
        _check_signed(data, trust, key, role)
        claims = decode_json(data, _Claims, run=trust.run, key=key, what=what)
        _check_claims(claims, trust, key, max_age_s, now)
    check_members(data, what, run=trust.run, key=key)
    return decode_json(data, kind, run=trust.run, key=key)


def sign_bytes(
    data: bytes, *, run_id: str, key: str, signer: Signer, role: str, now: float | None = None
) -> bytes:
    """``data`` and after it a line that signs it for ``key`` in ``role``."""
    content = _Content(
        run=run_id,
        signed_at=time.time() if now is None else now,
        bytes=len(data),
        content=blake3(data).hexdigest(),
    )
    return data + b"\n" + seal(content, key=key, signer=signer, role=role)


def open_bytes(
    data: bytes,
    *,
    trust: Trust,
    key: str,
    role: str,
    max_age_s: float | None = None,
    now: float | None = None,
) -> bytes:
    """Returns the bytes that `sign_bytes` signed, or ``data`` itself in an unsigned run; raises
    `CorruptError` as `open_json` does."""
    if not trust.owner:
        return data
    body, _, line = data[:-1].rpartition(b"\n")
    line += data[-1:]
    content = unseal(line, _Content, run=trust.run, key=key, what="signed object")
    _check_signed(line, trust, key, role)
    _check_claims(content, trust, key, max_age_s, now)
    if content.bytes != len(body) or content.content != blake3(body).hexdigest():
        raise CorruptError("the signature is of other bytes", run=trust.run, key=key)
    return body


def _check_signed(data: bytes, trust: Trust, key: str, role: str) -> None:
    if trust.verify is None:
        raise InputError("a signed run needs a verifier", hint="pass signing.verify")
    public_key = trust.key_of(role, key=key)
    check_signature(
        data, public_key=public_key, verify=trust.verify, run=trust.run, key=key, role=role
    )


def _check_claims(
    claims: _Claims | _Content, trust: Trust, key: str, max_age_s: float | None, now: float | None
) -> None:
    if claims.run != trust.run_id:
        raise CorruptError("the object belongs to another run", run=trust.run, key=key)
    age_s = (time.time() if now is None else now) - claims.signed_at
    if max_age_s is not None and not -CLOCKS_DIFFER_S <= age_s <= max_age_s:
        raise CorruptError(
            f"the object was signed {age_s:.0f} s ago; at most {max_age_s:.0f} s are allowed",
            hint="somebody shows an old state of the bucket, or a clock is wrong",
            run=trust.run,
            key=key,
        )

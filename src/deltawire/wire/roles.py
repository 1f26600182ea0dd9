"""Signs and checks objects by role in a signed run: which key may sign which object, and when it
did.

The run's owner grants one key to each role in a separate object, ``roles/<role>.json``. An object
of the loop is then followed by one line that signs its bytes in that role, and states the run and
the time of signing. An unsigned run has none of this.

Example::

    data = sign_bytes(group, run_id=run.id, key=key, signer=signer, role=worker_role("w0"))
    trust = Trust(run.id, run.public_key, {worker_role("w0"): grant.public_key}, verify)
    group = open_bytes(data, trust=trust, key=key, role=worker_role("w0")).data
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import msgspec
from blake3 import blake3
from msgspec import Meta

from deltawire.errors import CorruptError, InputError, SignatureError
from deltawire.wire import keys
from deltawire.wire.objects import FORMAT
from deltawire.wire.payload import Index
from deltawire.wire.run import Hash, Identity, PublicKey, Run, Size
from deltawire.wire.seal import OWNER, Signer, Verifier, check_signature, seal, unseal

TRAINER_ROLE = "trainer"
EVALUATOR_ROLE = "evaluator"
REFERENCE_ROLE = "reference"
"""The role that holds a frozen policy and stores its log-probabilities."""
WARM_START_ROLE = "warm-start"
SUPERVISOR_ROLE = "supervisor"
"""The role that starts the other processes, and records how they end."""
GATEWAY_ROLE = "gateway"
"""Every gateway of a deployment: signs answers, feedback, erasures and decisions."""
PROCESS_ROLES = (TRAINER_ROLE, EVALUATOR_ROLE, REFERENCE_ROLE, WARM_START_ROLE, SUPERVISOR_ROLE)
"""Roles of processes whose name is their role; every other process is a worker."""

MAX_GRANT_BYTES = 1 << 12
MAX_SIGNATURE_BYTES = 1 << 10
"""The most bytes that `sign_bytes` adds to an object."""
CLOCKS_DIFFER_S = 300.0
"""How far in the future a signing time may lie, in seconds."""

_PIN = re.compile(r"([0-9a-f]{64})(?::([0-9a-f]{32}))?")


def worker_role(worker: str) -> str:
    """Returns the role in which a worker signs its heartbeats and groups."""
    return f"worker-{worker}"


def run_of_line(run_id: str, line: str) -> str:
    """Returns the id of a line of a signed run: it follows from the run's, so that a reader that
    knows the run knows its lines."""
    return blake3(f"deltawire line {line} of {run_id}".encode()).hexdigest(length=16)


def role_of(process: str) -> str:
    """Returns the role in which a process of this name signs."""
    return process if process in PROCESS_ROLES else worker_role(process)


def role_for(key: str) -> str | None:
    """Returns the role that signs the object at ``key`` in a signed run.

    None for objects that are sealed (weights and grants, which the owner signs), that are covered
    by another object's hash (states of checkpoints), or that readers of a signed run do not read
    (a stored status).
    """
    if key in (keys.TRAINER, keys.RETAINED, keys.PROBES):
        return TRAINER_ROLE
    if key.startswith((keys.TOMBSTONES, keys.CHALLENGES, keys.ARCHIVE)):
        return TRAINER_ROLE
    if key.startswith(keys.CHECKPOINTS):
        return TRAINER_ROLE if key.endswith("/commit.json") else None
    if key.startswith(keys.REFERENCES):
        return REFERENCE_ROLE
    if key.startswith(keys.LIVE):
        for place in keys.LINEAGE_PREFIXES:
            if key.startswith(place):
                return worker_role(key.removeprefix(place).partition("/")[0])
        return GATEWAY_ROLE
    if key.startswith(keys.HEARTBEATS):
        process = keys.process_of(key)
    elif key.startswith(keys.EVENTS):
        process = keys.process_of_stream(key.removeprefix(keys.EVENTS).partition("/")[0])
    elif key.startswith(keys.LEASES):
        process = key.removeprefix(keys.LEASES).partition("/")[0]
    elif key.startswith(keys.ROLLOUTS):
        return worker_role(key.removeprefix(keys.ROLLOUTS).partition("/")[0])
    else:
        return None
    return None if process is None else role_of(process)


class RoleGrant(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="format", tag=FORMAT
):
    """The object at ``roles/<role>.json``: the key that may sign in ``role``.

    Of two grants of a role the one with the later ``granted_at`` (seconds since 1970) counts. The
    log of a role's grants, ``roles/<role>/<number>.json``, has each of them, with the hash of the
    one before in ``previous``. There were ``decisions`` decisions when it was given: the keys
    before signed only those. If it ``revokes``, the keys before count for nothing any more.
    """

    run: Identity
    role: Annotated[str, Meta(max_length=96)]
    public_key: PublicKey
    granted_at: float = 0.0
    decisions: Index = 0
    revokes: bool = False
    previous: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")] = ""


class _Statement(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="format", tag=FORMAT
):
    run: Identity
    signed_at: float
    bytes: Size
    content: Hash


class SignedBytes(NamedTuple):
    """The bytes that a role signed, and when (seconds since 1970)."""

    data: bytes
    signed_at: float


@dataclass(frozen=True)
class Pin:
    """The public key that a reader insists on, and optionally the run's id."""

    public_key: str
    run_id: str = ""

    @classmethod
    def parse(cls, text: str) -> Pin:
        """Parses ``<public key>`` or ``<public key>:<run id>``; raises `InputError` for anything
        else.
        """
        found = _PIN.fullmatch(text)
        if found is None:
            raise InputError(
                f"{text[:80]!r} is not a public key",
                hint="give the 64 hexadecimal digits that deltawire keygen prints; to accept one "
                "run only, add a colon and its id",
            )
        return cls(found[1], found[2] or "")

    def __str__(self) -> str:
        """Returns the text that `parse` takes."""
        return f"{self.public_key}:{self.run_id}" if self.run_id else self.public_key

    def check(self, public_key: str, run_id: str, *, run: str) -> None:
        """Raises `SignatureError` unless the run with this owner and id is the pinned one."""
        if public_key != self.public_key:
            raise SignatureError(
                "the run is signed by another key" if public_key else "the run is not signed",
                hint="is it the run that the public key belongs to?",
                run=run,
                key=keys.RUN,
            )
        if self.run_id and run_id != self.run_id:
            raise SignatureError(
                f"the run has the id {run_id[:80]}, not {self.run_id}",
                hint="someone replaced it with another run of the same owner",
                run=run,
                key=keys.RUN,
            )


def pin_of(run: Run) -> str:
    """Returns the pin of a signed run as text, empty if the run is not signed."""
    return str(Pin(run.public_key, run.id)) if run.public_key else ""


@dataclass(frozen=True)
class Trust:
    """The facts that a reader checks a signed run's objects against: the run's id, its owner's
    public key, the keys granted to roles, and how to verify a signature."""

    run_id: str
    owner: str
    grants: Mapping[str, str] = field(default_factory=dict)
    verify: Verifier | None = None
    run: str = ""
    """The bucket's URL, for messages."""

    def key_of(self, role: str, *, key: str) -> str:
        """Returns the public key of a role; raises `SignatureError` if none was granted."""
        found = self.owner if role == OWNER else self.grants.get(role)
        if found is None:
            raise SignatureError(
                f"no key is granted to the role {role!r}",
                hint="the owner of the run grants one with deltawire grant",
                run=self.run,
                key=key,
            )
        return found


def encode_grant(grant: RoleGrant, *, signer: Signer, key: str = "") -> bytes:
    """Encodes the object at ``key`` (by default `keys.role`), signed by the run's owner."""
    return seal(grant, key=key or keys.role(grant.role), signer=signer)


def decode_grant(data: bytes, role: str, *, trust: Trust, key: str = "") -> RoleGrant:
    """Parses a grant and checks that the run's owner gave it; raises `CorruptError`."""
    key = key or keys.role(role)
    grant = unseal(data, RoleGrant, run=trust.run, key=key, what="grant")
    _check_signed(data, trust, key, OWNER)
    if (grant.run, grant.role) != (trust.run_id, role):
        raise SignatureError("a grant of another run or role", run=trust.run, key=key)
    return grant


def sign_bytes(
    data: bytes, *, run_id: str, key: str, signer: Signer, role: str, now: float | None = None
) -> bytes:
    """Appends to ``data`` a line that signs it for ``key`` in ``role``."""
    statement = _Statement(
        run=run_id,
        signed_at=time.time() if now is None else now,
        bytes=len(data),
        content=blake3(data).hexdigest(),
    )
    return data + b"\n" + seal(statement, key=key, signer=signer, role=role)


def open_bytes(
    data: bytes,
    *,
    trust: Trust,
    key: str,
    role: str,
    max_age_s: float | None = None,
    now: float | None = None,
) -> SignedBytes:
    """Returns the bytes that `sign_bytes` signed.

    Raises `SignatureError` for bytes that are not signed, or that were signed in another role, by
    another key, for another key of the bucket or another run, longer than ``max_age_s`` ago, or
    more than `CLOCKS_DIFFER_S` in the future.
    """
    at = data.rfind(b"\n", max(0, len(data) - MAX_SIGNATURE_BYTES), max(0, len(data) - 1))
    body, line = data[: max(at, 0)], data[at + 1 :]
    try:
        stated = unseal(line, _Statement, run=trust.run, key=key, what="signed object")
    except SignatureError:
        raise
    except CorruptError as error:
        raise SignatureError(
            "the object is not signed, but the run is", run=trust.run, key=key
        ) from error
    _check_signed(line, trust, key, role)
    if stated.run != trust.run_id:
        raise SignatureError("the object belongs to another run", run=trust.run, key=key)
    if at < 0 or stated.bytes != len(body) or stated.content != blake3(body).hexdigest():
        raise SignatureError(
            "the signature does not match the object's bytes", run=trust.run, key=key
        )
    check_age(stated.signed_at, max_age_s, run=trust.run, key=key, now=now)
    return SignedBytes(body, stated.signed_at)


def _check_signed(data: bytes, trust: Trust, key: str, role: str) -> None:
    if trust.verify is None:
        raise InputError("a signed run needs a verifier", hint="pass signing.verify")
    public_key = trust.key_of(role, key=key)
    check_signature(
        data, public_key=public_key, verify=trust.verify, run=trust.run, key=key, role=role
    )


def check_age(
    signed_at: float, max_age_s: float | None, *, run: str, key: str, now: float | None = None
) -> None:
    """Raises `SignatureError` if the time of signing (seconds since 1970) lies more than
    ``max_age_s`` ago, or too far in the future.
    """
    age_s = (time.time() if now is None else now) - signed_at
    if age_s < -CLOCKS_DIFFER_S:
        raise SignatureError(
            f"the object was signed {-age_s:.0f} s in the future",
            hint="compare the clocks of this machine and of the one that wrote it",
            run=run,
            key=key,
        )
    if max_age_s is not None and age_s > max_age_s:
        raise SignatureError(
            f"the object was signed {age_s:.0f} s ago; at most {max_age_s:.0f} s are allowed",
            hint="the bucket shows an old state, the run has stopped, or a clock is wrong; "
            "--max-age sets the limit",
            run=run,
            key=key,
        )

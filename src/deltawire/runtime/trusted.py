"""Opens a run's bucket with the trust that a command's options ask for."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace

from deltawire.errors import InputError
from deltawire.runtime.signed_bucket import SignedBucket, grant_role
from deltawire.store import Bucket, open_bucket
from deltawire.sync.chain.objects import find_run
from deltawire.wire import keys
from deltawire.wire.roles import TRAINER_ROLE, Pin
from deltawire.wire.seal import Signer


@dataclass(frozen=True)
class ReaderTrust:
    """A reader's requirements: the owner's key and optionally the run (``--public-key``), the
    greatest age of the newest state in seconds, and whether a version older than one seen before is
    accepted.
    """

    pin: Pin | None = None
    max_age_s: float | None = None
    allow_rollback: bool = False

    @property
    def pinned(self) -> str:
        """The pin as text, empty if any run is accepted."""
        return "" if self.pin is None else str(self.pin)


ANY = ReaderTrust()
"""Accepts any ``run.json``."""


def open_trusted(
    location: str, trust: ReaderTrust = ANY, *, signer: Signer | None = None, role: str = ""
) -> SignedBucket:
    """Opens a run's bucket to read it, and with ``signer`` to write to it in ``role``. For the line
    of a signed run (``RUN/lines/NAME``), ``trust`` and ``signer`` are those of the run.

    Raises `InputError` for a wrong location, and `SignatureError` for a bucket that does not hold
    the pinned run, or holds only an older state of it.
    """
    bucket = open_bucket(location)
    upper, name = keys.split_line(bucket.url)
    if name:
        above = open_bucket(upper)
        if above.exists(keys.RUN):
            signed = trusted(above, trust, signer=signer, role=role)
            if signed.trust is not None:
                return signed.line(bucket, name)
    return trusted(bucket, trust, signer=signer, role=role)


def trusted(
    bucket: Bucket, trust: ReaderTrust = ANY, *, signer: Signer | None = None, role: str = ""
) -> SignedBucket:
    """Does what `open_trusted` does for an open bucket."""
    signed = SignedBucket(
        bucket, pin=trust.pin, signer=signer, role=role, max_age_s=trust.max_age_s
    )
    if trust.pin is not None:
        signed.remember(allow_rollback=trust.allow_rollback)
    return signed


def owned_run(bucket: Bucket, owner: Signer, pin: Pin | None = None) -> Pin:
    """Returns the pin of the run that ``owner`` owns here; for a run that does not exist yet, with
    its future id: that of ``pin``, or a new one.

    Raises `InputError` if ``pin`` names another key, and `SignatureError` if the run in the bucket
    is not the owner's, or not the pinned one.
    """
    if pin is not None and pin.public_key != owner.public_key:
        raise InputError(
            "--key and --public-key belong to different keys",
            hint=f"the public key of --key is {owner.public_key}",
        )
    wanted = Pin(owner.public_key, pin.run_id if pin else "")
    run = find_run(bucket, public_key=str(wanted))
    found = run.id if run is not None else wanted.run_id or secrets.token_hex(16)
    return Pin(owner.public_key, found)


def open_as_trainer(bucket: Bucket, owner: Signer | None, trust: ReaderTrust = ANY) -> SignedBucket:
    """Opens a run's bucket for the trainer in this process. In a signed run, ``owner`` is the key
    of the run's owner, which also signs in the trainer's role.

    Raises `InputError` if the run is signed and ``owner`` is None, or if it is not signed and there
    is one, and `SignatureError` if another key owns it.
    """
    if owner is not None:
        pin = owned_run(bucket, owner, trust.pin)
        grant_role(bucket, owner, run_id=pin.run_id, role=TRAINER_ROLE, public_key=owner.public_key)
        trust = replace(trust, pin=pin)
    signed = trusted(bucket, trust, signer=owner, role=TRAINER_ROLE)
    signed.check_writer()
    return signed

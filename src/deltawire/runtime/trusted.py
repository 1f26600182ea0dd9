"""Opens a run's bucket the way a command was told to trust it."""

from __future__ import annotations

from dataclasses import dataclass

from deltawire.runtime.signed_bucket import SignedBucket
from deltawire.store import Bucket, RetryingBucket, open_bucket
from deltawire.wire.roles import Pin
from deltawire.wire.seal import Signer


@dataclass(frozen=True)
class ReaderTrust:
    """A reader's requirements: the owner's key and perhaps the run (``--public-key``), how long
    ago the newest state may have been signed in seconds, and whether an older version than one
    that was seen before is accepted."""

    pin: Pin | None = None
    max_age_s: float | None = None
    allow_rollback: bool = False

    @property
    def pinned(self) -> str:
        """The pin as text, empty if any run is accepted."""
        return "" if self.pin is None else str(self.pin)


ANY = ReaderTrust()
"""Accepts whatever ``run.json`` says."""


def open_trusted(
    location: str, trust: ReaderTrust = ANY, *, signer: Signer | None = None, role: str = ""
) -> SignedBucket:
    """Open a run's bucket to read it, and with ``signer`` to write to it in ``role``.

    Raises `InputError` for a wrong location, and `SignatureError` for a bucket that does not hold
    the pinned run, or holds only an older state of it.
    """
    return trusted(open_bucket(location), trust, signer=signer, role=role)


def trusted(
    bucket: Bucket, trust: ReaderTrust = ANY, *, signer: Signer | None = None, role: str = ""
) -> SignedBucket:
    """As `open_trusted`, for a bucket that is open already."""
    signed = SignedBucket(
        bucket, pin=trust.pin, signer=signer, role=role, max_age_s=trust.max_age_s
    )
    if trust.pin is not None:
        signed.over(RetryingBucket.over(bucket)).remember(allow_rollback=trust.allow_rollback)
    return signed

"""Seals objects: JSON that ends in the BLAKE3 of its bytes, optionally signed.

A sealed object is one line of JSON, whose last members are, in this order and with no space::

    …,"signer":"<role>","signature":"<128 hex digits>","blake3":"<64 hex digits>"}⏎

``blake3`` is the hash of every byte before ``,"blake3"``. ``signer`` and ``signature`` are there
only in a signed run: Ed25519 over the domain `DOMAIN`, the object's key in the bucket, a zero byte,
and every byte before ``,"signature"``, the role of the signer included. The hash covers the stored
bytes, not a re-encoding, so it detects any flipped bit, even in a member that this release ignores.
"""

from __future__ import annotations

import re
from typing import Protocol, TypeVar

import msgspec
from blake3 import blake3

from deltawire.errors import CorruptError, SignatureError
from deltawire.wire.objects import check_members, decode_json

T = TypeVar("T", bound=msgspec.Struct)

DOMAIN = b"deltawire sealed object 1\0"
OWNER = "owner"
"""The role of the run's own key."""

_SEAL = re.compile(rb',"blake3":"([0-9a-f]{64})"\}\n\Z')
_SEAL_BYTES = len(b',"blake3":""}\n') + 64
_SIGNATURE = re.compile(rb',"signature":"([0-9a-f]{128})"\Z')
_SIGNATURE_BYTES = len(b',"signature":""') + 128
_ROLE = re.compile(rb',"signer":"([a-z0-9][A-Za-z0-9:_-]{0,95})"\Z')
_ROLE_BYTES = len(b',"signer":""') + 96


class Signer(Protocol):
    """The interface of a holder of a private key."""

    @property
    def public_key(self) -> str:
        """The public half: 64 hexadecimal digits."""

    def sign(self, message: bytes) -> bytes:
        """Returns the signature of ``message``: 64 bytes."""


class Verifier(Protocol):
    """A function that checks a signature."""

    def __call__(self, public_key: str, signature: bytes, message: bytes) -> bool:
        """Returns whether ``signature`` signs ``message`` under ``public_key``."""


def seal_json(body: bytes, *, key: str, signer: Signer | None = None, role: str = OWNER) -> bytes:
    """Seals ``body``, a JSON object of at least one member, for the object at ``key``; with
    ``signer``, signed in the given role.
    """
    body = body.rstrip().removesuffix(b"}")
    if signer is not None:
        body += b',"signer":"%s"' % role.encode()
        body += b',"signature":"%s"' % signer.sign(_message(key, body)).hex().encode()
    return b'%s,"blake3":"%s"}\n' % (body, blake3(body).hexdigest().encode())


def seal(
    value: msgspec.Struct, *, key: str, signer: Signer | None = None, role: str = OWNER
) -> bytes:
    """Encodes and seals ``value`` as the object at ``key``."""
    return seal_json(msgspec.json.encode(value), key=key, signer=signer, role=role)


def unseal(data: bytes, kind: type[T], *, run: str, key: str, what: str = "") -> T:
    """Checks the seal, the format and the members of ``data`` and decodes it; `check_signature`
    checks the signature. Messages call the object ``what``.

    Raises `CorruptError` if a single bit differs from what was sealed.
    """
    what = what or kind.__name__.lower()
    check_seal(data, what, run=run, key=key)
    check_members(data, what, run=run, key=key)
    return decode_json(data, kind, run=run, key=key, what=what)


def check_seal(data: bytes, what: str, *, run: str, key: str) -> None:
    """Raises `CorruptError` unless ``data``, a ``what``, is a sealed object."""
    found = _SEAL.search(data, max(len(data) - _SEAL_BYTES, 0))
    if found is None or blake3(data[: found.start()]).hexdigest().encode() != found[1]:
        raise CorruptError(
            f"not a valid {what}: its bytes do not match its seal",
            hint="the object is damaged, or was not written by deltawire",
            run=run,
            key=key,
        )


def check_signature(
    data: bytes, *, public_key: str, verify: Verifier, run: str, key: str, role: str = OWNER
) -> None:
    """Raises `SignatureError` unless the sealed ``data`` is signed for this ``key`` of the bucket
    by the owner of ``public_key``, in the given role.
    """
    body = data[: max(len(data) - _SEAL_BYTES, 0)]
    found = _SIGNATURE.search(body, max(len(body) - _SIGNATURE_BYTES, 0))
    if found is None:
        raise SignatureError("the object is not signed, but the run is", run=run, key=key)
    message = body[: found.start()]
    signer = _ROLE.search(message, max(len(message) - _ROLE_BYTES, 0))
    if signer is None or signer[1].decode() != role:
        said = "no role" if signer is None else f"the role {signer[1].decode()!r}"
        raise SignatureError(f"the object is signed in {said}, not as {role!r}", run=run, key=key)
    if not verify(public_key, bytes.fromhex(found[1].decode()), _message(key, message)):
        raise SignatureError(
            f"the signature was not made with the {role}'s key",
            hint="someone else has written to the bucket, or the public key belongs to another run",
            run=run,
            key=key,
        )


def _message(key: str, body: bytes) -> bytes:
    return DOMAIN + key.encode() + b"\0" + body

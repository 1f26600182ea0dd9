"""Receipts: sealed statements of what was served to whom, by which weights.

A receipt is text of three parts, ``dw2.<generation>.<box>``. The generation is the fingerprint of
that generation of the deployment's secret whose receipt key sealed the box. The box is base64url
without padding: 24 random bytes, and the receipt as MessagePack, encrypted and authenticated by
ChaCha20-Poly1305 with a key that follows from the receipt key and those bytes. The holder of a
receipt can report about one answer, and can neither read nor change nor make one: an arm or a
version that users could read would let them vote on it. Receipts are padded, so that their length
tells nothing either.

Gateways of earlier releases signed receipts that all can read, ``dw1.<payload>.<signature>``, with
Ed25519 over `DOMAIN` and the payload. They are accepted from keys that the secret has adopted.

Example::

    text = seal_receipt(receipt, "0" * 32, receipt_key)
    keys = ReceiptKeys({"0" * 32: receipt_key})
    assert read_receipt(text, keys=keys, run=receipt.run) == receipt
"""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import numpy as np
from blake3 import blake3
from msgspec import Meta

from deltawire.errors import InputError
from deltawire.wire.objects import prepared
from deltawire.wire.payload import Index
from deltawire.wire.run import Identity
from deltawire.wire.signing import verify

DOMAIN = b"deltawire receipt 1\0"
SIGNED = "dw1"
SEALED = "dw2"
_KEY_CONTEXT = "deltawire 2026 key of one receipt"
_SALT_BYTES = 24
_NONCE = bytes(12)
"""Each receipt has a key that is used once, so the nonce is constant."""
_PADDED_BYTES = 256
MAX_RECEIPT_CHARACTERS = 8192
MAX_SPANS = 256
"""Version changes within one answer, at most: more make the answer unusable for training."""
SERVING = "serving"
"""The arm of users that no canary is shown to."""

Pseudonym = Annotated[str, Meta(pattern=r"^([0-9a-f]{32})?\Z")]
"""A user, as a keyed hash; empty if the request named none."""
Arm = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9_-]{0,63}\Z")]
Span = tuple[Index, Annotated[int, Meta(ge=1, le=1 << 31)]]
"""A weight version, and how many consecutive tokens it drew."""


class Receipt(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The facts about one answer.

    ``answer`` is unique; ``turn`` counts the answers of the ``conversation`` before this one.
    ``propensity`` is the probability with which the user was assigned to ``arm``. ``spans`` are
    the versions of the tokens in order, and ``tokens`` is `hash_tokens` of prompt and answer; both
    are empty if the engine did not state them. ``recorded`` says that the answer was stored for
    training. ``at`` is in seconds since 1970.
    """

    run: Identity
    answer: Identity
    conversation: Identity
    turn: Annotated[int, Meta(ge=0, le=1 << 20)]
    user: Pseudonym
    arm: Arm
    propensity: Annotated[float, Meta(gt=0, le=1)]
    spans: Annotated[list[Span], Meta(max_length=MAX_SPANS)]
    tokens: Annotated[str, Meta(pattern=r"^([0-9a-f]{32})?\Z")]
    recorded: bool
    at: float


def hash_tokens(prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """Returns the first 32 hexadecimal digits of the BLAKE3 of the number of prompt tokens (int64),
    the prompt and the answer (int32, little-endian)."""
    data = np.asarray([len(prompt)], "<i8").tobytes()
    data += np.asarray(prompt, "<i4").tobytes() + np.asarray(tokens, "<i4").tobytes()
    return blake3(data).hexdigest()[:32]


def spans_of(versions: Iterable[int]) -> list[Span]:
    """Returns per-token versions as spans."""
    spans: list[Span] = []
    for version in versions:
        if spans and spans[-1][0] == version:
            spans[-1] = (version, spans[-1][1] + 1)
        else:
            spans.append((version, 1))
    return spans


@dataclass(frozen=True)
class ReceiptKeys:
    """The keys that a deployment reads receipts with: ``sealing`` by the fingerprint of their
    generation, and ``signing``, the public keys of gateways of earlier releases."""

    sealing: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    signing: frozenset[str] = frozenset()


def seal_receipt(receipt: Receipt, generation: str, key: bytes) -> str:
    """Returns the receipt's text, sealed with a generation's receipt ``key`` of 32 bytes."""
    payload = msgspec.msgpack.encode(receipt)
    payload = len(payload).to_bytes(4, "little") + payload
    payload += bytes(-len(payload) % _PADDED_BYTES)
    salt = secrets.token_bytes(_SALT_BYTES)
    sealed = _cipher(key, salt).encrypt(_NONCE, payload, generation.encode())
    return f"{SEALED}.{generation}.{_text(salt + sealed)}"


def read_receipt(text: str, *, keys: ReceiptKeys, run: str) -> Receipt | None:
    """Returns the receipt that ``text`` states; None unless the holder of one of ``keys`` made it
    for ``run``. The caller must not tell which check failed."""
    parts = text.split(".") if len(text) <= MAX_RECEIPT_CHARACTERS else []
    if len(parts) != 3:
        return None
    try:
        payload = _opened(parts, keys)
        if payload is None:
            return None
        receipt = msgspec.msgpack.decode(payload, type=prepared(Receipt))
    except (ValueError, binascii.Error, msgspec.MsgspecError, RecursionError):
        return None
    return receipt if receipt.run == run else None


def _opened(parts: list[str], keys: ReceiptKeys) -> bytes | None:
    kind, name, rest = parts
    if kind == SIGNED:
        payload, signature = _data(name), _data(rest)
        if len(signature) != 64:
            return None
        signed = any(verify(one, signature, DOMAIN + payload) for one in keys.signing)
        return payload if signed else None
    key, data = keys.sealing.get(name), _data(rest)
    if kind != SEALED or key is None or len(data) < _SALT_BYTES:
        return None
    from cryptography.exceptions import InvalidTag

    salt, sealed = data[:_SALT_BYTES], data[_SALT_BYTES:]
    try:
        payload = bytes(_cipher(key, salt).decrypt(_NONCE, sealed, name.encode()))
    except InvalidTag:
        return None
    return payload[4 : 4 + int.from_bytes(payload[:4], "little")]


def _cipher(key: bytes, salt: bytes) -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    except ImportError as error:
        raise InputError(
            "receipts need the package cryptography", hint="pip install 'deltawire[sign]'"
        ) from error
    return ChaCha20Poly1305(blake3(key + salt, derive_key_context=_KEY_CONTEXT).digest())


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _data(text: str) -> bytes:
    data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    if _text(data) != text:  # One receipt has one text: unused bits are no second spelling.
        raise ValueError(text)
    return data

"""Receipts: signed statements of what was served to whom, by which weights.

A receipt is text of three parts, ``dw1.<payload>.<signature>``: the payload is MessagePack and the
signature Ed25519 over `DOMAIN` and the payload, both in base64url without padding. Whoever holds a
receipt can report about one answer; nobody without the deployment's key can make or change one.

Example::

    text = sign_receipt(receipt, Ed25519Signer.generate())
    assert read_receipt(text, public_key=signer.public_key, run=receipt.run) == receipt
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec
import numpy as np
from blake3 import blake3
from msgspec import Meta

from deltawire.wire.objects import prepared
from deltawire.wire.payload import Index
from deltawire.wire.run import Identity
from deltawire.wire.seal import Signer
from deltawire.wire.signing import verify

DOMAIN = b"deltawire receipt 1\0"
PREFIX = "dw1"
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


def sign_receipt(receipt: Receipt, signer: Signer) -> str:
    """Returns the receipt's text."""
    payload = msgspec.msgpack.encode(receipt)
    return f"{PREFIX}.{_text(payload)}.{_text(signer.sign(DOMAIN + payload))}"


def read_receipt(text: str, *, public_key: str, run: str) -> Receipt | None:
    """Returns the receipt that ``text`` states; None unless the owner of ``public_key`` signed it
    for ``run``. The caller must not tell which check failed."""
    parts = text.split(".") if len(text) <= MAX_RECEIPT_CHARACTERS else []
    if len(parts) != 3 or parts[0] != PREFIX:
        return None
    try:
        payload, signature = _data(parts[1]), _data(parts[2])
    except (ValueError, binascii.Error):
        return None
    if len(signature) != 64 or not verify(public_key, signature, DOMAIN + payload):
        return None
    try:
        receipt = msgspec.msgpack.decode(payload, type=prepared(Receipt))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    return receipt if receipt.run == run else None


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _data(text: str) -> bytes:
    data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    if _text(data) != text:  # One receipt has one text: unused bits are no second spelling.
        raise ValueError(text)
    return data

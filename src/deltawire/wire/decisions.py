"""Decisions: which version serves which users, as an append-only series in the bucket.

``live/decisions/<n>.json``, numbered from 0, is created if absent: of two gateways that decide at
once one succeeds, and the other reads what was decided. The newest decision counts. In a signed run
the role ``gateway`` signs it.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import msgspec
from blake3 import blake3
from msgspec import Meta

from deltawire.wire.objects import FORMAT
from deltawire.wire.payload import Index
from deltawire.wire.receipts import SERVING, Pseudonym
from deltawire.wire.run import Identity

MAX_DECISION_BYTES = 1 << 16
CANDIDATE = "candidate"
"""The arm of users that a canary is shown to."""

Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
Verdict = Literal["serve", "gate", "shadow", "canary", "hold", "promote", "rollback"]


class ServedVersion(msgspec.Struct, frozen=True):
    """A version, and the digest of its weights."""

    version: Index
    digest: Digest


class Decision(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="format", tag=FORMAT
):
    """The object at ``live/decisions/<number>.json``.

    Of all users the ``share`` is assigned to the ``candidate``, by a hash of ``salt`` and the
    user, so that a user keeps its arm as the share grows. ``by`` is the gateway or the person that
    decided, ``reason`` a sentence for people, and ``evidence`` the figures that it rests on.
    """

    number: Index
    run: Identity
    verdict: Verdict
    serving: ServedVersion
    candidate: ServedVersion | None = None
    share: Annotated[float, Meta(ge=0, le=1)] = 0.0
    salt: Annotated[str, Meta(max_length=64)] = ""
    at: float
    by: Annotated[str, Meta(max_length=64)]
    reason: Annotated[str, Meta(max_length=1024)] = ""
    evidence: Annotated[dict[str, float], Meta(max_length=256)] = {}


class Assignment(NamedTuple):
    """A user's arm, the probability of that assignment, and the version; None for any version."""

    arm: str
    propensity: float
    version: int | None


def assign(decision: Decision | None, user: Pseudonym) -> Assignment:
    """Returns the arm of a user; one without a pseudonym stays on the serving version."""
    if decision is None:
        return Assignment(SERVING, 1.0, None)
    if decision.candidate is None or not decision.share or not user:
        return Assignment(SERVING, 1.0, decision.serving.version)
    digest = blake3(f"{decision.salt}\0{user}".encode()).digest(8)
    if int.from_bytes(digest, "big") < decision.share * 2.0**64:
        return Assignment(CANDIDATE, decision.share, decision.candidate.version)
    return Assignment(SERVING, 1.0 - decision.share, decision.serving.version)

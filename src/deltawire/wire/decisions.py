"""Decisions: which version serves which users, as an append-only series in the bucket.

``live/decisions/<n>.json``, numbered from 0, is created if absent: of two gateways that decide at
once one succeeds, and the other reads what was decided. The newest decision counts. In a signed run
the role ``gateway`` signs it. A decision that `fault_after` refuses is void: readers skip it.

A trainer follows a rollback with a new version, whose metadata has a `RestoreRecord`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
from blake3 import blake3
from msgspec import Meta

from deltawire.errors import CorruptError
from deltawire.wire import keys
from deltawire.wire.ledger import DroppedRange
from deltawire.wire.objects import FORMAT, prepared
from deltawire.wire.payload import Index
from deltawire.wire.receipts import SERVING, Pseudonym
from deltawire.wire.run import Identity

MAX_DECISION_BYTES = 1 << 16
CANDIDATE = "candidate"
"""The arm of users that a canary is shown to."""
HOLD_BACK = "hold_back"
"""The arm of users who keep the hold-back version."""

Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
Verdict = Literal["serve", "gate", "shadow", "canary", "hold", "promote", "rollback"]
UNDECIDED: Final = frozenset({"gate", "shadow", "canary", "hold"})
"""Verdicts after which a candidate is still to be decided."""


UpstreamName = Annotated[str, Meta(pattern=r"^([a-z0-9][a-z0-9-]{0,31})?\Z")]
"""The name that a gateway's operator gives to another provider's model; empty for none."""


class ServedVersion(msgspec.Struct, frozen=True, omit_defaults=True):
    """A version, and the digest of its weights.

    Or an ``upstream``: another provider's model, of whose weights nothing is known. Its ``version``
    is a negative number and its ``digest`` a hash, both of its name only, so that two upstreams
    differ as two versions do.
    """

    version: Annotated[int, Meta(ge=-(1 << 32), le=1 << 48)]
    digest: Digest
    upstream: UpstreamName = ""

    @classmethod
    def of_upstream(cls, name: str) -> ServedVersion:
        """Returns the upstream of this name.

        Example::

            ServedVersion.of_upstream("openai").words  # "upstream openai"
        """
        digest = blake3(f"deltawire upstream\0{name}".encode()).digest(16)
        return cls(-1 - int.from_bytes(digest[:4], "big") % (1 << 32), digest.hex(), name)

    @property
    def words(self) -> str:
        """Returns its name for people."""
        return f"upstream {self.upstream}" if self.upstream else f"version {self.version}"

    @property
    def is_sound(self) -> bool:
        """Returns whether number and digest are those of the upstream that is named, if any is."""
        return self == self.of_upstream(self.upstream) if self.upstream else self.version >= 0


class Decision(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="format", tag=FORMAT
):
    """The object at ``live/decisions/<number>.json``.

    Of all users the ``share`` is assigned to the ``candidate``, by a hash of ``salt`` and the
    user, so that a user keeps its arm as the share grows. ``generation`` is that of the
    deployment's secret whose pseudonyms are hashed: a rotation meanwhile moves no user. ``by`` is
    the process or the person that decided, ``reason`` a sentence for people, and ``evidence`` the
    figures that it rests on. In a shadow, ``copies`` is the share of users' requests that the
    candidate answers too, unseen by users, and ``salt`` names the shadow. A hold says what it
    waits for; it either shows the candidate to as many users as the decision before, or to none:
    then all users are back on the serving version. A rollback names the rejected version as its
    candidate, with share 0. ``previous`` is the BLAKE3 hash of the object of the valid decision
    before, so that no decision can be taken out of the series unnoticed; empty for the first one,
    and for those of releases that wrote none.

    The ``hold_back_share`` of all users keeps the version ``hold_back``, in place of the serving
    version and of any candidate. They are drawn again for each version that serves.
    """

    number: Index
    run: Identity
    verdict: Verdict
    serving: ServedVersion
    candidate: ServedVersion | None = None
    share: Annotated[float, Meta(ge=0, le=1)] = 0.0
    copies: Annotated[float, Meta(ge=0, le=1)] = 0.0
    salt: Annotated[str, Meta(max_length=64)] = ""
    generation: Index = 0
    waits_for: Literal["", "data", "person"] = ""
    at: float
    by: Annotated[str, Meta(max_length=64)]
    reason: Annotated[str, Meta(max_length=1024)] = ""
    evidence: Annotated[dict[str, float], Meta(max_length=256)] = {}
    previous: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")] = ""
    hold_back: ServedVersion | None = None
    hold_back_share: Annotated[float, Meta(ge=0, lt=1)] = 0.0

    @property
    def held_back(self) -> ServedVersion | None:
        """The version that some users keep, if it has other weights than the one that serves."""
        held = self.hold_back
        if held is None or not self.hold_back_share or held.digest == self.serving.digest:
            return None
        return held

    @property
    def gives_way(self) -> bool:
        """Returns whether a newer version may be tested in place of this decision's candidate."""
        return self.verdict == "hold" and self.waits_for == "data"


RESTORES = "restores_version"
"""The figure of a promotion that names the version whose weights the promoted one restores."""
GATE_FAILURES = "gate_failures"
"""The figure of a rollback by the evaluation gate: how many candidates in a row it stopped."""
PAUSED_UNTIL = "paused_until"
"""The figure of such a rollback that says until when learning pauses, in seconds since 1970."""
ENDED = "ended_undecided"
"""The figure of a hold that ended a canary without a decision: its candidate is shown no more."""
MARGIN_SPENT = "margin_spent"
"""The figure of a promotion that says which part of a lineage's budget of margins it spent."""
FORGETS = "forgets_versions"
"""The figure of a rollback that rebuilds a run without a user's answers: how many versions had been
trained on them. Learners then train again on the other answers of the withdrawn versions."""
DECAYED = "decayed"
"""The figure of a rollback to the hold-back version: users of the versions since were worse off."""
RESTORE_RECORD = "deltawire.restore"
"""The member of a manifest's metadata that holds a `RestoreRecord`."""

RestoredState = Literal["exact", "weights"]


class RestoreRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Marks a version that has the weights of ``restored``, as rollback ``decision`` asked.

    The versions from ``first`` to ``last`` are withdrawn, and ``groups`` are those that they
    consumed: they stay consumed. ``state`` is what training continues from. ``exact``: the masters
    and the optimizer of ``restored``, from the checkpoint of version ``checkpoint`` and ``steps``
    steps that were computed again. ``weights``: masters equal to the published weights, and a new
    optimizer.
    """

    decision: Index
    restored: ServedVersion
    first: Index
    last: Index
    state: RestoredState
    checkpoint: Index = 0
    steps: Index = 0
    groups: Annotated[list[DroppedRange], Meta(max_length=1 << 20)] = []

    @classmethod
    def of(cls, values: Mapping[str, Any], *, run: str, version: int) -> RestoreRecord | None:
        """Checks the record of a manifest's metadata; None if there is none. Raises
        `CorruptError`."""
        if RESTORE_RECORD not in values:
            return None
        key, fault = keys.manifest(version), ""
        try:
            found = msgspec.convert(values[RESTORE_RECORD], prepared(cls))
        except msgspec.ValidationError as error:
            raise CorruptError(f"metadata: {error}", run=run, version=version, key=key) from error
        if not 0 <= found.restored.version < found.first <= found.last < version:
            fault = "a version restores one that is not before those that it withdraws"
        elif odd := [name for name, _, _ in found.groups if not keys.valid_name(name)]:
            fault = f"{odd[0][:40]!r} is not the name of a worker"
        if fault:
            raise CorruptError(f"metadata: {fault}", run=run, version=version, key=key)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Returns the member of the manifest's metadata."""
        return {RESTORE_RECORD: msgspec.to_builtins(self)}


class Assignment(NamedTuple):
    """A user's arm, the probability of that assignment, and the version; None for any version.

    ``kept`` is the share of users who keep the hold-back version, if this user is compared with
    them or is one of them; 0 for all others. Among users of the hold-back version, those whom the
    canary would have assigned to its candidate are not compared, so that the two groups differ in
    nothing but the first draw. The ``propensity`` of the other arms is among those who do not keep
    it.
    """

    arm: str
    propensity: float
    version: int | None
    kept: float = 0.0


def fault_after(before: Decision | None, decision: Decision) -> str:
    """Returns why ``decision`` cannot follow the valid decision ``before``; empty if it can."""
    verdict, candidate = decision.verdict, decision.candidate
    if fault := _fault_within(decision):
        return fault
    if before is None:
        return "" if verdict == "serve" else f"a series that begins with {verdict}"
    if verdict == "serve":
        return "a second beginning"
    if decision.number <= before.number or decision.run != before.run:
        return "another run, or an older number"
    if verdict == "promote":
        return "a promotion with a candidate or a share" if candidate or decision.share else ""
    if candidate is None or candidate.version == decision.serving.version:
        return "no candidate"
    if verdict == "rollback":
        return "a rollback with a share" if decision.share else ""
    if decision.serving != before.serving:
        return "another version serves without a promotion or a rollback"
    if verdict == "gate":
        newer = before.candidate is not None and candidate.version > before.candidate.version
        if before.verdict in UNDECIDED and not (before.gives_way and newer):
            return "a candidate while another one is undecided"
        return "a share before a canary" if decision.share else ""
    if before.verdict not in UNDECIDED or candidate != before.candidate:
        return "no candidate to go on with"
    return _fault_between(before, decision)


def _fault_within(decision: Decision) -> str:
    """Returns why a decision contradicts itself."""
    named = (decision.serving, decision.candidate, decision.hold_back)
    if not all(one.is_sound for one in named if one is not None):
        return "a number that is not that of the upstream it names"
    if decision.copies and (decision.verdict not in ("shadow", "hold") or decision.share):
        return "copies of requests outside a shadow"
    if decision.hold_back_share and decision.hold_back is None:
        return "a share of users without a hold-back version"
    return ""


def _fault_between(before: Decision, decision: Decision) -> str:
    """Returns why ``decision`` cannot change what an undecided candidate is shown."""
    if decision.verdict == "hold":
        keeps = _seen(decision) in (_seen(before), (0.0, 0.0, "", 0))
        return (
            "" if keeps and decision.waits_for else "a hold that moves users, or waits for nothing"
        )
    if decision.verdict == "shadow":
        if _seen(before)[:3] != (0.0, 0.0, ""):
            return "a shadow that does not follow the gate"
        fits = decision.copies and decision.salt and not decision.share
        return "" if fits else "a shadow without copies or a name, or with a share"
    if before.salt and (decision.salt, decision.generation) != (before.salt, before.generation):
        return "a canary that assigns users again"
    return "" if decision.share > before.share else "a canary whose share does not grow"


def _seen(decision: Decision) -> tuple[float, float, str, int]:
    """Returns what a decision shows of its candidate: share of users, copies, salt, generation."""
    return decision.share, decision.copies, decision.salt, decision.generation


def assign(decision: Decision | None, user: Pseudonym) -> Assignment:
    """Returns the arm of a user; one without a pseudonym stays on the serving version."""
    if decision is None:
        return Assignment(SERVING, 1.0, None)
    serving, candidate = decision.serving, decision.candidate
    if not user:
        return Assignment(SERVING, 1.0, serving.version)
    share = decision.share if candidate is not None else 0.0
    shown = _is_drawn(decision.salt, user, share)
    kept = 0.0
    if (held := decision.held_back) is not None:
        kept = decision.hold_back_share
        if _is_drawn(f"hold-back {serving.version}-{serving.digest}", user, kept):
            return Assignment(HOLD_BACK, kept, held.version, 0.0 if shown else kept)
    if candidate is not None and shown:
        return Assignment(CANDIDATE, share, candidate.version)
    return Assignment(SERVING, 1.0 - share, serving.version, kept)


def _is_drawn(salt: str, user: Pseudonym, share: float) -> bool:
    digest = blake3(f"{salt}\0{user}".encode()).digest(8)
    return int.from_bytes(digest, "big") < share * 2.0**64

"""Compares weights with a reference, tensor by tensor, and names why one differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import numpy as np

from deltawire.attest.causes import Cause, Known, name_cause
from deltawire.attest.places import Place
from deltawire.attest.sides import Side, require_one_model
from deltawire.codec import Digest

Verdict = Literal["equal", "differs", "not readable", "copies disagree"]


NAMED = 3
"""Tensors that one sentence names."""


class TensorVerdict(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The verdict on one tensor of the reference.

    ``cause`` is one word of `causes.CAUSES` if a cause explains the bits, ``text`` the sentence for
    people, or the reason why it is not readable. ``rows`` is the half-open range of rows that the
    cause is about, if these are not all. ``changed`` counts the elements that differ, where both
    sides have elements. ``ranks`` are those that hold what differs.
    """

    name: str
    verdict: Verdict
    cause: str = ""
    text: str = ""
    rows: tuple[int, int] | None = None
    changed: int | None = None
    ranks: list[int] = []


class WeightReport(msgspec.Struct, frozen=True, kw_only=True):
    """Lists the verdict on each tensor of a reference.

    ``equal`` is true only if each tensor of the reference is. ``unexpected`` names tensors that the
    reference does not have. Of an engine, ``uncovered`` names live parameters that no tensor of the
    reference is loaded into, and ``untouched`` those that still have the bits of the engine's start
    although others were updated. ``notes`` says what could not be tried.
    """

    found: str
    reference: str
    equal: bool
    counts: dict[Verdict, int]
    tensors: list[TensorVerdict]
    unexpected: list[str] = []
    uncovered: list[str] = []
    untouched: list[str] = []
    notes: list[str] = []

    @property
    def differs(self) -> bool:
        """Returns whether a tensor is known to differ."""
        return bool(self.counts["differs"] + self.counts["copies disagree"])

    @property
    def problem(self) -> str:
        """Says which tensors differ, the first of them by name; empty if none is known to."""
        odd = [one for one in self.tensors if one.verdict in ("differs", "copies disagree")]
        if not odd:
            return ""
        named = [f"{one.name} ({one.text or one.verdict})" for one in odd[:NAMED]]
        more = f", and {len(odd) - NAMED} more" if len(odd) > NAMED else ""
        return (
            f"{self.found} holds other weights than {self.reference} in {len(odd)} of "
            f"{len(self.tensors)} tensors: {', '.join(named)}{more}"
        )


def compare(
    found: Side, reference: Side, others: Callable[[], Sequence[Side]] = tuple
) -> WeightReport:
    """Compares the digests of two sides.

    ``others`` opens further versions that explain a difference, such as the version before; it is
    called only if there is one. Raises `InputError` if the sides are different models.
    """
    require_one_model([found, reference])
    names = sorted({*reference.digests.by_name, *reference.digests.aliases})
    known = Known(reference, found, others)
    tensors = []
    for name in names:
        verdict = _verdict(name, known)
        if verdict is not None:
            tensors.append(verdict)
    held = {*found.digests.by_name} - {*names}
    notes = []
    if known.asked and not known.has_elements:
        notes.append(
            "neither side has elements: causes that permute or scale them were not tried; give a "
            "folder or a version of a run on one side"
        )
    return report_of(found.name, reference.name, tensors, unexpected=sorted(held), notes=notes)


def report_of(
    found: str,
    reference: str,
    tensors: list[TensorVerdict],
    *,
    unexpected: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> WeightReport:
    """Returns the report over verdicts."""
    counts: dict[Verdict, int] = {
        "equal": 0, "differs": 0, "not readable": 0, "copies disagree": 0,
    }  # fmt: skip
    for one in tensors:
        counts[one.verdict] += 1
    return WeightReport(
        found=found,
        reference=reference,
        equal=counts["equal"] == len(tensors) > 0,
        counts=counts,
        tensors=tensors,
        unexpected=list(unexpected),
        notes=list(notes),
    )


def _verdict(name: str, known: Known) -> TensorVerdict | None:
    """Returns the verdict on one name; None for an alias that both sides tie."""
    found, reference = known.found.digests, known.reference.digests
    tied = reference.aliases.get(name)
    spec = reference.by_name[tied or name].spec
    held_name = found.aliases.get(name, name)
    held = found.by_name.get(held_name)
    if tied is not None and (held is None or held_name == tied):
        return None
    if name in known.disagreeing:
        text = "ranks hold copies with different bits"
        return TensorVerdict(name=name, verdict="copies disagree", text=text)
    if held is None:
        text = f"{known.found.name} does not have it"
        return TensorVerdict(name=name, verdict="not readable", text=text)
    if held.dtype != spec.dtype:
        text = f"it is {held.dtype}, the reference {spec.dtype}"
        return TensorVerdict(name=name, verdict="not readable", text=text)
    bits, wanted = None, None
    if tied is not None or held_name != name:  # The digests are of other names.
        bits, wanted = known.found.values(name), known.reference.values(name)
        if bits is None or wanted is None:
            text = "it is tied on one side only, and digests of two names cannot be compared"
            return TensorVerdict(name=name, verdict="not readable", text=text)
    place = Place.whole(msgspec.structs.replace(spec, shape=held.shape))
    digest = Digest.from_hex(held.digest) if bits is None else place.digest(name, bits)
    goal = (
        Digest.from_hex(reference.by_name[name].digest)
        if wanted is None
        else place.digest(name, wanted)
    )
    if digest == goal and held.shape == spec.shape:
        return TensorVerdict(name=name, verdict="equal")
    return _differs(name, place, digest, known, tied)


def _differs(
    name: str, place: Place, digest: Digest, known: Known, tied: str | None
) -> TensorVerdict:
    cause = name_cause(name, place, digest, known)
    if cause is None and tied is not None:
        cause = Cause("untied", f"the reference ties it to {tied}, and it has other values here")
    ours, theirs = known.found.values(name), known.reference.values(name)
    changed = None
    if ours is not None and theirs is not None and ours.size == theirs.size:
        changed = int(np.count_nonzero(ours != theirs))
    return TensorVerdict(
        name=name,
        verdict="differs",
        cause="" if cause is None else cause.kind,
        text="" if cause is None else cause.text,
        rows=None if cause is None else cause.rows,
        changed=changed,
    )

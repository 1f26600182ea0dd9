"""Asks a server of vLLM or SGLang what its ranks hold, and compares each part with a reference."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from deltawire.attest.causes import Cause, Known, name_cause
from deltawire.attest.combining import described, total_of
from deltawire.attest.places import Place
from deltawire.attest.requests import RefusedError, send
from deltawire.attest.sides import Side
from deltawire.attest.verdicts import TensorVerdict, WeightReport, report_of
from deltawire.codec import Digest
from deltawire.engines.live_parts import METHOD, AttestRequest, EngineParts, LivePart, RankParts
from deltawire.errors import CorruptError, InputError, RetryError
from deltawire.wire.objects import prepared
from deltawire.wire.run import TensorSpec

MAX_ANSWER_BYTES = 256 << 20

NOT_FOUND = 404
REFUSED = (401, 403)

T = TypeVar("T")

LOOKS = 5
PAUSE_S = 0.5
"""Seconds between two looks at weights that are not equal."""

HINT = (
    "start vLLM with DELTAWIRE_ATTEST=1 and VLLM_SERVER_DEV_MODE=1, with deltawire installed there"
)
HINT_SGLANG = "start SGLang with DELTAWIRE_ATTEST=1, with deltawire installed there"
BETWEEN = " | "
"""The text between the messages of SGLang's data-parallel ranks."""


IMPOSSIBLE = "its live bits are none that a published value gives"


class UpdatingError(RetryError):
    """The engine is in the middle of an update: its parameters have no memory."""


class Held(NamedTuple):
    """One part of a tensor on one rank. ``digest`` is None if it is not readable, or if no
    published value gives its bits."""

    rank: int
    place: Place
    digest: Digest | None
    reason: str


def ask_engine(url: str, reference: Side, *, token: str = "") -> list[RankParts]:
    """Has every rank of the server at ``url`` digest what it holds of the reference's tensors.

    Raises `InputError` for a server that does not attest, or on which a rank fails, `CorruptError`
    for an answer that cannot be read.
    """
    url = url.rstrip("/")
    asked = request_of(reference)
    try:
        body = {"method": METHOD, "args": [asked]}
        data = _sent(f"{url}/collective_rpc", body, token, HINT)
    except RefusedError as error:
        # With two keys, SGLang refuses the admin key at a path that it does not have.
        if error.status not in (NOT_FOUND, *REFUSED):
            raise
        return _ask_sglang(url, asked, token, error)
    return _without_failures(_decoded(data, EngineParts, url, HINT).results, url)


def _ask_sglang(url: str, asked: str, token: str, missing: RefusedError) -> list[RankParts]:
    """Asks a server that has no ``/collective_rpc``, as vLLM's have; raises ``missing`` if it has
    no ``/weights_checker`` either."""
    try:
        data = _sent(f"{url}/weights_checker", {"action": f"{METHOD} {asked}"}, token, HINT_SGLANG)
    except RefusedError as error:
        other = error.status == NOT_FOUND or missing.status in REFUSED
        raise missing if other else error from None
    found: list[RankParts] = []
    for text in _decoded(data, _Checked, url, HINT_SGLANG).message.split(BETWEEN):
        found += _decoded(text.encode(), EngineParts, url, HINT_SGLANG).results
    ranks = [msgspec.structs.replace(one, rank=rank) for rank, one in enumerate(found)]
    return _without_failures(ranks, url)


class _Checked(msgspec.Struct):
    """The answer of SGLang: `EngineParts` in JSON, or several of them with `BETWEEN`."""

    message: str


def _sent(url: str, body: dict[str, Any], token: str, hint: str) -> bytes:
    data = json.dumps(body).encode()
    return send(url, limit=MAX_ANSWER_BYTES, token=token, body=data, hint=hint)


def _decoded(data: bytes, kind: type[T], url: str, hint: str) -> T:
    try:
        return msgspec.json.decode(data, type=prepared(kind))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(
            f"the answer of {url} cannot be read: {str(error)[:200]}", hint=hint
        ) from error


def request_of(reference: Side) -> str:
    """Returns what is asked of each rank, as its method takes it."""
    specs = [one.spec for one in reference.digests.tensors]
    request = AttestRequest(specs, reference.digests.aliases, since_loading=True)
    return msgspec.json.encode(request).decode()


def ranks_of(answers: Any, name: str) -> list[RankParts]:
    """Checks what the ranks of an engine answered without HTTP; raises as `ask_engine` does."""
    try:
        found = msgspec.convert({"results": answers}, type=prepared(EngineParts)).results
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CorruptError(f"the answer of {name} cannot be read: {str(error)[:200]}") from error
    return _without_failures(found, name)


def _without_failures(found: list[RankParts], name: str) -> list[RankParts]:
    for one in found:
        if one.failure:
            raise InputError(f"rank {one.rank} of {name} cannot attest: {one.failure}")
    if any(one.updating for one in found):
        raise UpdatingError(f"{name} is in the middle of an update")
    return found


def compare_settled(
    name: str,
    ask: Callable[[], list[RankParts]],
    reference: Side,
    others: Callable[[], Sequence[Side]] = tuple,
) -> WeightReport:
    """Asks an engine and compares. If something is not equal, it asks again until two answers are
    the same: an update in several calls may be halfway in between. After `LOOKS` the last answer
    counts, and a note says that the weights kept changing. Raises `UpdatingError` if the engine
    was in the middle of an update at the last look, and as ``ask`` does."""
    before: list[RankParts] | None = None
    ranks: list[RankParts] = []
    for look in range(1, LOOKS + 1):
        try:
            ranks = ask()
        except UpdatingError:
            if look == LOOKS:
                raise
        else:
            report = compare_engine(name, ranks, reference)
            if report.equal:
                return report
            if before is not None and _bits_of(before) == _bits_of(ranks):
                return compare_engine(name, ranks, reference, others)
            before = ranks
        if look < LOOKS:
            time.sleep(PAUSE_S)
    note = f"the weights changed between {LOOKS} looks: an update is under way"
    report = compare_engine(name, ranks, reference, others)
    return msgspec.structs.replace(report, notes=[*report.notes, note])


def _bits_of(ranks: Sequence[RankParts]) -> list[tuple[int, list[LivePart]]]:
    return [(one.rank, one.parts) for one in ranks]


def compare_engine(
    url: str,
    ranks: Sequence[RankParts],
    reference: Side,
    others: Callable[[], Sequence[Side]] = tuple,
) -> WeightReport:
    """Compares what the ranks hold with the reference.

    With elements of the reference each part on each rank is compared with its own elements. With
    digests only, the parts that together hold each element once are added up, and further copies
    are compared with those of the same place. Raises `CorruptError` for parts outside of their
    tensors, `InputError` if no rank holds any tensor of the reference.
    """
    specs = [one.spec for one in reference.digests.tensors]
    held = _by_tensor(specs, ranks)
    if not any(held.values()):
        raise InputError(
            f"{url} and {reference.name} are different models: the engine holds no tensor named "
            f"{min(held, default='')[:80]!r}, nor any other of the reference",
            hint="are the names those of the checkpoint?",
        )
    sums = {name: _sum_once(spec, held[name]) for name, spec in _named(specs)}
    summed = (described(s, one) for s in specs if (one := sums[s.name]) is not None)
    found = Side(url, total_of(summed))
    known = Known(reference, found, others)
    unplaced = {name: why for one in ranks for name, why in one.unplaced.items()}
    tensors = [
        _verdict(spec, held[spec.name], sums[spec.name], known, unplaced.get(spec.name, ""))
        for spec in specs
    ]
    report = report_of(url, reference.name, tensors)
    failed = [f"no cause was looked for: {known.failed}"] if known.failed else []
    return msgspec.structs.replace(
        report,
        notes=[*report.notes, *failed],
        uncovered=sorted({name for one in ranks for name in one.uncovered}),
        untouched=_untouched(ranks),
    )


def _untouched(ranks: Sequence[RankParts]) -> list[str]:
    """Returns the live parameters that no update has changed since loading, on some rank; none if
    nothing was updated yet."""
    if not any(one.updated for one in ranks):
        return []
    return sorted({name for one in ranks for name in one.untouched})


def _named(specs: Sequence[TensorSpec]) -> list[tuple[str, TensorSpec]]:
    return [(spec.name, spec) for spec in specs]


def _by_tensor(specs: Sequence[TensorSpec], ranks: Sequence[RankParts]) -> dict[str, list[Held]]:
    found: dict[str, list[Held]] = {spec.name: [] for spec in specs}
    for one in ranks:
        for part in one.parts:
            if part.tensor >= len(specs):
                raise CorruptError(f"rank {one.rank} names a tensor that was not asked for")
            spec = specs[part.tensor]
            place = Place(part.start, part.shape, part.strides)
            place.check(spec)
            found[spec.name].append(Held(one.rank, place, _digest(part), part.reason))
    return found


def _digest(part: LivePart) -> Digest | None:
    return Digest.from_hex(part.digest) if part.digest else None


def _sum_once(spec: TensorSpec, parts: Sequence[Held]) -> Digest | None:
    """Returns the digest of the tensor, from parts that hold each element once; None if these do
    not cover it, or are not readable."""
    if sum(part.place.count for part in parts) < spec.count:  # A file may state any size.
        return None
    covered = np.zeros(spec.count, np.bool_)
    total = Digest(0, 0)
    for part in parts:
        inside = part.place.view(covered)
        if part.digest is None or inside.any():
            continue
        inside[...] = True
        total += part.digest
    return total if covered.all() else None


def _verdict(
    spec: TensorSpec, parts: list[Held], once: Digest | None, known: Known, unplaced: str
) -> TensorVerdict:
    reason = next((part.reason for part in parts if part.reason), "")
    if not parts:
        text = unplaced or "no live tensor holds it"
        return TensorVerdict(name=spec.name, verdict="not readable", text=text)
    # Without elements, such as those of a file that is gone by now, the digests are compared.
    bits = known.tried(lambda: known.reference.values(spec.name))
    goal = Digest.from_hex(known.reference.digests.by_name[spec.name].digest)
    if bits is None:
        wrong = _unlike(parts)
    else:
        wanted = {one: one.digest(spec.name, one.take(bits)) for one in {p.place for p in parts}}
        wrong = [p for p in parts if not p.reason and p.digest != wanted[p.place]]
    if not wrong and once == goal and not reason:
        return TensorVerdict(name=spec.name, verdict="equal")
    ranks = sorted({part.rank for part in wrong})
    places = {part.place for part in parts if part not in wrong and not part.reason}
    if wrong and all(part.place in places for part in wrong):
        tied = known.alias_of.get(spec.name)
        cause = known.tried(lambda: _part_cause(spec, wrong, known))
        text = "another copy of the same elements has other bits"
        text += f"; {tied} is tied to it in the reference" if tied else ""
        text += f"; {cause.text}" if cause is not None else ""
        return TensorVerdict(
            name=spec.name, verdict="copies disagree", ranks=ranks, text=text,
            cause="untied" if tied else "" if cause is None else cause.kind,
        )  # fmt: skip
    if not wrong and (once is None or reason):
        odd = any(part.digest is None and not part.reason for part in parts)
        text = reason or unplaced or (IMPOSSIBLE if odd else "the ranks hold only a part of it")
        return TensorVerdict(name=spec.name, verdict="not readable", text=text)
    cause = known.tried(lambda: _cause(spec, wrong, once, known))
    return TensorVerdict(
        name=spec.name,
        verdict="differs",
        cause="" if cause is None else cause.kind,
        text="" if cause is None else cause.text,
        rows=None if cause is None else cause.rows,
        ranks=ranks,
    )


def _unlike(parts: Sequence[Held]) -> list[Held]:
    """Returns the parts that differ from an earlier one at the same place."""
    first: dict[Place, Digest | None] = {}
    readable = [part for part in parts if not part.reason]
    return [part for part in readable if first.setdefault(part.place, part.digest) != part.digest]


def _cause(
    spec: TensorSpec, wrong: Sequence[Held], once: Digest | None, known: Known
) -> Cause | None:
    cause = None if once is None else name_cause(spec.name, Place.whole(spec), once, known)
    return cause or _part_cause(spec, wrong, known)


def _part_cause(spec: TensorSpec, wrong: Sequence[Held], known: Known) -> Cause | None:
    """Returns the one cause that explains each part that is wrong."""
    found = {_cause_of(spec, part, known) for part in wrong}
    return found.pop() if len(found) == 1 else None


def _cause_of(spec: TensorSpec, part: Held, known: Known) -> Cause | None:
    bits = known.reference.values(spec.name)
    if part.digest is None or bits is None:
        return None
    name, place = spec.name, part.place
    if place.digest(name, np.zeros(place.count, bits.dtype)) == part.digest:
        return Cause("zeros", "all its elements there are zero")
    for other in known.others:
        theirs = other.values(name)
        if theirs is None or theirs.size != bits.size or theirs.dtype != bits.dtype:
            continue
        if place.digest(name, place.take(theirs)) == part.digest:
            return Cause("version", f"there it holds the weights of {other.name}")
    for start in _starts_alike(spec, place):
        moved = Place(start, place.shape, place.strides)
        if place.digest(name, moved.take(bits)) == part.digest:
            return Cause("rank", f"it holds the elements from {start} on, those of another rank")
    return None


def _starts_alike(spec: TensorSpec, place: Place) -> list[int]:
    """Returns where other ranks' parts of the same shape begin, if the ranks divide rows or columns
    evenly."""
    found = []
    for size, stride in zip(place.shape, place.strides, strict=True):
        step = size * stride
        for start in range(place.start % step if step else 0, spec.count, step or spec.count):
            last = start + sum((n - 1) * s for n, s in zip(place.shape, place.strides, strict=True))
            if start != place.start and last < spec.count:
                found.append(start)
    return found[:64]

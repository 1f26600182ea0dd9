"""Lists what `make check-protocol` explores: the worlds with their bounds, and broken protocols.

Each invariant has at least one broken protocol, the code with one of its rules taken out, that
must be refuted: an exploration that refutes nothing proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import leases
import ledgers
import worlds
from compactions import compaction
from copied_forks import copied_forks
from erasures import erasures, first_time, once_a_look
from exploring import Bounds, Found, World, explore
from granting import granting
from ledgers import consumption
from ranks import ranks
from relays import relays
from restores import restores
from stepping import ScriptedBucket

from deltawire.errors import CorruptError, InputError
from deltawire.launch.branches import forking
from deltawire.live.capture.uploader import SpoolUploader
from deltawire.live.capture.uploader import _without as without
from deltawire.live.erasure import forgetting
from deltawire.rl.control.credits import CreditIssuer, settle
from deltawire.rl.trainer.rollbacks import RollbackWatch
from deltawire.runtime.lease import Lease
from deltawire.sync.chain import gc_intents, history, retention, tags
from deltawire.sync.chain.evidence import Absent, Sound, listed_twice
from deltawire.sync.maintain.relay import Relay
from deltawire.sync.publish import commit, sharded
from deltawire.sync.publish import compaction as compacting
from deltawire.sync.publish.publisher import Publisher
from deltawire.wire import keys
from deltawire.wire.captures import encode_segment
from deltawire.wire.ledger import CommitMetadata, Ledger

NO_ANSWER = frozenset({"lost", "late"})
LATE = frozenset({"late"})
SHORT = frozenset({"short"})
BAD = frozenset({"short", "damaged"})


@dataclass(frozen=True)
class Case:
    """A world within bounds; ``small`` ones are explored by `make test` too, ``long`` ones only by
    long drills: each has a relative among the others with fewer faults, writers or steps."""

    name: str
    make: Callable[[], World]
    bounds: Bounds
    small: bool = False
    long: bool = False


@dataclass(frozen=True)
class Broken:
    """A protocol without one rule: ``fault`` is a part of what the explorer must find."""

    name: str
    make: Callable[[], World]
    bounds: Bounds
    fault: str
    patches: tuple[Any, ...] = field(default=())
    small: bool = True


def _writers(*values: list[int], **more: Any) -> Callable[[], World]:
    return partial(worlds.commits, values=values, **more)


_deletions = worlds.deletions
_read = partial(worlds.deletions, reading=True)
_blobs = partial(worlds.deletions, whole=False)
_stalls = partial(worlds.deletions, whole=False, stalls=True)

_compacted = partial(compaction, whole=False)
_twice = partial(ranks, sessions=("old", "new"))
_deleted = partial(ranks, deleting=True)
_both = partial(erasures, users=("ann", "bob"), uploading=False)

CASES = [
    Case("one writer", _writers([11, 21]), Bounds(1), small=True),
    Case("two writers", _writers([11], [12]), Bounds(1), small=True),
    Case("two writers, two versions", _writers([11, 21], [12, 22]), Bounds(1)),
    Case("three writers", _writers([11], [12], [13]), Bounds(), small=True),
    Case("two writers, a reader", _writers([11], [12], reading=2), Bounds(), small=True),
    Case("one writer, two faults", _writers([11, 21]), Bounds(2), long=True),
    Case("two writers, two faults", _writers([11], [12]), Bounds(2), long=True),
    Case(
        "three writers, two versions", _writers([11, 21], [12, 22], [13, 23]), Bounds(1), long=True
    ),
    Case("three writers, a reader", _writers([11], [12], [13], reading=1), Bounds(1), long=True),
    Case("two writers, one that restarts", _writers([11], [12], restart=True), Bounds(1)),
    Case("retention, a writer", _deletions, Bounds(), small=True),
    Case("deletion of blobs, a writer, short listings", _blobs, Bounds(1, kinds=SHORT), small=True),
    Case("deletion of blobs, a writer", _blobs, Bounds(1)),
    Case("deletion of blobs, a writer, time", _blobs, Bounds(0, 3)),
    Case(
        "deletion of blobs, a writer, late deletions, time", _blobs, Bounds(1, 3, LATE), long=True
    ),
    Case("two deletions of blobs, a writer", partial(_blobs, times=2), Bounds(), long=True),
    Case("retention, a writer, bad answers", _deletions, Bounds(1, kinds=BAD)),
    Case("retention, a writer, no answer", _deletions, Bounds(1, kinds=NO_ANSWER), long=True),
    Case("retention, a writer, a reader", _read, Bounds(), long=True),
    Case("retention, a tag", worlds.tags, Bounds(), small=True),
    Case("retention, a tag, bad answers", worlds.tags, Bounds(1, kinds=BAD)),
    Case("retention, a tag, no answer", worlds.tags, Bounds(1, kinds=NO_ANSWER), long=True),
    Case("retention, a fork that is copied", copied_forks, Bounds(), small=True),
    Case("leases of two processes", leases.leases, Bounds(1), small=True),
    Case("leases of three processes", partial(leases.leases, 3), Bounds(1)),
    Case("a relay, a writer, a reader", partial(relays, reading=True), Bounds(), small=True),
    Case("a relay, a writer", relays, Bounds(1)),
    Case("two relays, a writer", partial(relays, count=2), Bounds(), long=True),
    Case("compaction, deletion of blobs", _compacted, Bounds(), small=True),
    Case("compaction, retention, a reader", partial(compaction, reading=True), Bounds()),
    Case(
        "compaction, deletion of blobs, a reader, bad answers",
        partial(_compacted, reading=True),
        Bounds(1, kinds=BAD),
        long=True,
    ),
    Case(
        "two compactors, deletion of blobs, no answer",
        partial(_compacted, count=2),
        Bounds(1, kinds=NO_ANSWER),
        long=True,
    ),
    Case("compaction, late deletions, time", _compacted, Bounds(1, 3, LATE)),
    Case("two ranks", ranks, Bounds(1), small=True),
    Case("two ranks, another trainer", partial(ranks, alone=True), Bounds(1)),
    Case("two ranks, twice", _twice, Bounds()),
    Case("two ranks, twice, no answer", _twice, Bounds(1, kinds=NO_ANSWER), long=True),
    Case("two ranks, deletion of blobs, bad answers", _deleted, Bounds(1, kinds=BAD)),
    Case(
        "two ranks, deletion of blobs, no answer", _deleted, Bounds(1, kinds=NO_ANSWER), long=True
    ),
    Case("an erasure, a gateway", erasures, Bounds(1)),
    Case("an erasure, a gateway, no answer", erasures, Bounds(1, kinds=NO_ANSWER), small=True),
    Case("two erasures", _both, Bounds(1, kinds=NO_ANSWER)),
    Case("consumption", consumption, Bounds(), small=True),
    Case("consumption, groups deleted", partial(consumption, trims=True), Bounds()),
    Case("consumption of one group", partial(consumption, groups=1, steps=1), Bounds(1)),
    Case(
        "consumption of two groups, deleted",
        partial(consumption, steps=1, trims=True),
        Bounds(1),
        long=True,
    ),
    Case("credits", granting, Bounds(), small=True),
    Case("a restore", partial(restores, alone=True), Bounds(), small=True),
]


def _overwrites(self: ScriptedBucket, key: str, data: bytes) -> bool:
    self.ask("put", key, bytes(data))
    return True


def _settled(self: Publisher) -> None:
    self._unanswered = None


def _read_as_it_comes(_bucket: Any, _key: str, read: Callable[[], Any], **_: Any) -> Any:
    return read()


def _damaged_is_absent(_bucket: Any, _key: str, read: Callable[[], Any]) -> Any:
    try:
        found = read()
    except CorruptError:
        found = None
    return Absent() if found is None else Sound(found)


def _listed_once(self: Any, prefix: str, *, after: str | None = None) -> Any:
    """The second of two listings in a row is the first."""
    known = getattr(self, "listed", None)
    if known is None or known[0] != (prefix, after, len(self.requests)):
        found = _LIST(self, prefix, after=after)
        self.listed = ((prefix, after, len(self.requests)), found)
    return self.listed[1]


_LIST = ScriptedBucket.list_objects


def _unchecked(self: Relay) -> bytes | None:
    return self.source.get(keys.RUN, limit=1 << 20)


def _any_lease(self: Lease) -> bool:
    self._bucket.create(self._key, self._nonce)
    return True


def _confirm_once(self: Lease, *, fresh: bool) -> None:
    self.check()
    if self.error is not None:
        raise self.error


def _tags_once(self: Any, cutoff: int, newest: int) -> int:
    return cutoff if self.found.anchor is not None else _TAGGED(self, cutoff, newest)


def _no_floors(bucket: Any, prefix: str) -> list[str]:
    return [] if prefix == keys.RETENTION_FLOORS else listed_twice(bucket, prefix)


_TAGGED = retention._Retention._tagged


def _read_once(self: Any) -> set[str]:
    if not self._updated:
        return _UPDATE(self)
    return self._found


def _run_looked_at_once(self: commit.VersionWriter) -> None:
    found = self.bucket.head(keys.RUN) or self.bucket.head(keys.RUN)
    if found is None or commit.find_run(self.bucket) is None:
        raise InputError("run.json has disappeared")


def _believed(_bucket: Any, _key: str, read: Callable[[], Any]) -> Any:
    return read()


def _deleted_is_foreign(*args: Any, **more: Any) -> bytes:
    return _AGREED(*args, **more) or b"deleted"


def _as_wanted(self: SpoolUploader, _stream: Any, number: int, rows: list[bytes]) -> bytes:
    return encode_segment(self._gateway, number, without(rows, self._forgotten()))


def _settled_at_once(self: CreditIssuer, version: int, metadata: CommitMetadata) -> None:
    settle(self.ledger, metadata)
    self.write()


_AGREED = sharded.require_agreed
_UPDATE = retention._References.update

_two = _writers([11], [12])
_seen = _writers([11], [12], reading=1, readers_only=True)
_patch = mock.patch.object


def _always(value: Any) -> Any:
    """An attribute that keeps one value, whatever is assigned."""
    return property(lambda _: value, lambda *_: None)


BROKEN = [
    Broken(
        "a store that overwrites on create", _two, Bounds(), "was replaced",
        (_patch(ScriptedBucket, "create", _overwrites),),
    ),
    Broken(
        "a store that overwrites on create, seen by a reader", _seen, Bounds(),
        "that no manifest names", (_patch(ScriptedBucket, "create", _overwrites),),
    ),
    Broken(
        "a writer that takes any manifest for its own", _two, Bounds(), "which is not its own",
        (_patch(Publisher, "_check_mine", lambda *_: None),),
    ),
    Broken(
        "a writer that takes one answer for the truth", _writers([11]), Bounds(1),
        "nobody else wrote", (_patch(commit, "require_evidence", _read_as_it_comes),),
    ),
    Broken(
        "a writer that looks once at the run", _writers([11]), Bounds(1), "nobody changed the run",
        (_patch(commit.VersionWriter, "check_run", _run_looked_at_once),),
    ),
    Broken(
        "a writer that goes on after it was fenced", _two, Bounds(), "although it was fenced",
        (
            _patch(Publisher, "flush", lambda self: self._commits.wait()),
            _patch(Publisher, "settle", _settled),
            _patch(Publisher, "_fenced", _always(None), create=True),
        ),
    ),
    Broken(
        "a writer that does not wait for intents", _deletions, Bounds(), "was deleted",
        (_patch(gc_intents, "_wait_for", lambda *_: None),),
    ),
    Broken(
        "retention that does not read manifests again", _deletions, Bounds(), "was deleted",
        (_patch(retention._References, "update", _read_once),),
    ),
    Broken(
        "an intent that goes although a deletion got no answer", _deletions,
        Bounds(1, kinds=NO_ANSWER), "was deleted",
        (_patch(gc_intents._Deletions, "all_answered", _always(True), create=True),),
        small=False,
    ),
    Broken(
        "writers that wait as long as deletions begin only", _blobs, Bounds(1, 3, LATE),
        "was deleted", (_patch(gc_intents, "margin_s", lambda _: 0.0),), small=False,
    ),
    Broken(
        "retention that stalls between its clock and a request", _stalls, Bounds(0, 4),
        "was deleted", small=False,
    ),
    Broken(
        "retention that takes a damaged answer for an absent object", _blobs, Bounds(1, kinds=BAD),
        "was deleted", (_patch(history, "evidence_of", _damaged_is_absent),), small=False,
    ),
    Broken(
        "listings that count after one answer", _blobs, Bounds(1, kinds=SHORT), "was deleted",
        (_patch(ScriptedBucket, "list_objects", _listed_once),), small=False,
    ),
    Broken(
        "retention that reads tags once", worlds.tags, Bounds(), "which a tag needs",
        (_patch(retention._Retention, "_tagged", _tags_once),),
    ),
    Broken(
        "a tag whose writer does not look at the floors", worlds.tags, Bounds(),
        "which a tag needs", (_patch(tags, "listed_twice", _no_floors),),
    ),
    Broken(
        "a fork that copies a version without a tag", copied_forks, Bounds(),
        "retention deleted what it needs", (_patch(forking, "add_tag", lambda *_, **__: None),),
    ),
    Broken(
        "a process that takes any lease for its own", leases.leases, Bounds(), "took lease",
        (_patch(Lease, "_create", _any_lease),),
    ),
    Broken(
        "a process that asks once whether it was replaced", leases.leases, Bounds(1),
        "after a later one", (_patch(Lease, "confirm", _confirm_once),),
    ),
    Broken(
        "a relay that does not check what it copies", relays, Bounds(1, kinds=BAD),
        "is not what the source has", (_patch(Relay, "_run_at_source", _unchecked),),
    ),
    Broken(
        "a compactor that does not look for its blobs", _compacted, Bounds(), "lacks a blob",
        (_patch(compacting, "blobs_stay", lambda *_, **__: True),),
    ),
    Broken(
        "ranks that do not look for their blobs", _deleted, Bounds(), "was deleted",
        (_patch(commit.VersionWriter, "confirm", lambda *_, **__: None),),
    ),
    Broken(
        "a leader that takes one answer for the truth", ranks, Bounds(1), "nobody else wrote",
        (_patch(sharded, "read_again", _believed),),
    ),
    Broken(
        "a rank that takes a part which the leader deleted for another's", ranks, Bounds(1),
        "nobody else wrote", (_patch(sharded, "require_agreed", _deleted_is_foreign),),
    ),
    Broken(
        "a gateway that does not read again who was forgotten",
        partial(erasures, reading=first_time), Bounds(), "who was forgotten",
    ),
    Broken(
        "a gateway that lists once who was forgotten", partial(erasures, reading=once_a_look),
        Bounds(1, kinds=SHORT), "who was forgotten",
    ),
    Broken(
        "a gateway that takes what it has stored before as it is", erasures,
        Bounds(1, kinds=NO_ANSWER), "who was forgotten",
        (_patch(SpoolUploader, "_stored_before", _as_wanted),),
    ),
    Broken(
        "erasures that do not look for others", _both, Bounds(), "who was forgotten",
        (_patch(forgetting, "_forgotten", lambda _: frozenset()),),
    ),
    Broken(
        "a trainer that does not read what was consumed", consumption, Bounds(), "consumed twice",
        (_patch(ledgers, "ledger_of", lambda *_: Ledger()),),
    ),
    Broken(
        "a trainer that deletes groups before it commits", partial(consumption, hasty=True),
        Bounds(), "is lost",
    ),
    Broken(
        "a trainer that grants for groups of a version that is not committed", granting, Bounds(),
        "are granted", (_patch(CreditIssuer, "expect", _settled_at_once),),
    ),
    Broken(
        "a trainer that does not look whether a decision was followed",
        partial(restores, alone=True), Bounds(), "was followed twice",
        (_patch(RollbackWatch, "_is_restored", lambda *_: False),),
    ),
]  # fmt: skip


@contextmanager
def broken(case: Broken) -> Iterator[None]:
    """Takes the rule out of the code."""
    with ExitStack() as stack:
        for one in case.patches:
            stack.enter_context(one)
        yield


def check(case: Case) -> Found:
    """Explores a case."""
    return explore(case.make(), case.bounds)


def refute(case: Broken) -> Found:
    """Explores a broken protocol, without reductions: so its trace is a shortest one."""
    with broken(case):
        return explore(case.make(), case.bounds, reduced=False)

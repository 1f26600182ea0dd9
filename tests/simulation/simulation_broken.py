"""Lists what the simulation must find: the code, or the store, without one of its rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest import mock

import simulated_workers

from deltawire.errors import CorruptError, InputError
from deltawire.rl.control.rollout_retention import RolloutRetention
from deltawire.rl.rollout.uploader import Uploader
from deltawire.runtime.process import Process
from deltawire.sync.chain import gc_intents, history, retention
from deltawire.sync.chain.evidence import Absent, Sound
from deltawire.sync.maintain.relay import Relay
from deltawire.sync.publish import commit, later_anchors
from deltawire.sync.publish.publisher import Publisher
from deltawire.wire import keys
from deltawire.wire.rollouts import Group


@dataclass(frozen=True)
class Broken:
    """A rule that is taken out: patches of the code, or a promise that the store breaks.

    ``rare`` ones were not found within some minutes: too much has to coincide.
    """

    name: str
    patches: tuple[Any, ...] = ()
    store: str = ""
    rare: bool = False

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Takes the rule out."""
        with ExitStack() as stack:
            for one in self.patches:
                stack.enter_context(one)
            yield


_patch = mock.patch.object
_UPDATE = retention._References.update
_PRUNE = retention._Retention.prune
_TRIM = RolloutRetention.trim


def _read_once(self: Any) -> set[str]:
    return self._found if self._updated else _UPDATE(self)


def _without_grace(self: Any, cutoff: int, grace: timedelta) -> Any:
    return _PRUNE(self, cutoff, grace * 0.9)


def _damaged_is_absent(_bucket: Any, _key: str, read: Callable[[], Any]) -> Any:
    try:
        found = read()
    except CorruptError:
        found = None
    return Absent() if found is None else Sound(found)


def _run_looked_at_once(self: commit.VersionWriter) -> None:
    if commit.find_run(self.bucket) is None:
        raise InputError("run.json has disappeared", run=self.bucket.url, key=keys.RUN)


def _nothing(*_: Any, **__: Any) -> None:
    pass


class _Forgets(set[str]):
    def add(self, element: str) -> None:
        pass


def _after_the_stored(process: Process) -> int:
    found = process.bucket.list(keys.rollouts_of(process.name))
    return max((keys.trailing_number(key) or 0 for key in found), default=-1) + 1


def _without_checkpoint(self: RolloutRetention, *, newest: int, oldest_checkpoint: int) -> int:
    return _TRIM(self, newest=newest, oldest_checkpoint=max(newest, oldest_checkpoint))


def _any_is_mine(self: Uploader, group: Group, data: bytes) -> None:
    if not self._bucket.create(keys.rollout(self._worker, self.stored), data):
        assert group.nonce


def _always(value: Any) -> Any:
    """An attribute that keeps one value, whatever is assigned."""
    return property(lambda _: value, lambda *_: None)


BROKEN = [
    Broken("a create that overwrites", store="create"),
    Broken("a store that answers before it has flushed", store="flush"),
    Broken(
        "a publisher that takes any manifest for its own",
        (_patch(Publisher, "_check_mine", _nothing),),
    ),
    Broken(
        "a publisher that forgets its earlier attempts",
        (_patch(Publisher, "_nonces", _always(_Forgets()), create=True),),
        rare=True,
    ),
    Broken(
        "a publisher that looks once at the run",
        (_patch(commit.VersionWriter, "check_run", _run_looked_at_once),),
    ),
    Broken(
        "a publisher that does not look for its blobs after the commit",
        (_patch(commit, "keep_blobs", _nothing), _patch(later_anchors, "keep_blobs", _nothing)),
    ),
    Broken(
        "a publisher that does not wait for intents",
        (_patch(gc_intents, "_wait_for", _nothing),),
        rare=True,
    ),
    Broken(
        "retention that does not read manifests again",
        (_patch(retention._References, "update", _read_once),),
        rare=True,
    ),
    Broken(
        "retention that closes versions after 9/10 of the grace period",
        (_patch(retention._Retention, "prune", _without_grace),),
    ),
    Broken(
        "retention that takes an anchor whose blobs it did not look for",
        (_patch(retention._Retention, "_is_there", lambda *_: True),),
        rare=True,
    ),
    Broken(
        "retention that takes a damaged answer for an absent object",
        (_patch(history, "evidence_of", _damaged_is_absent),),
    ),
    Broken(
        "retention that takes a copied tombstone for its own",
        (
            _patch(retention._Retention, "_first", lambda _: 0),
            _patch(retention._Retention, "_is_closed", lambda *_: True),
        ),
    ),
    Broken(
        "a relay that does not look for its blobs after the commit",
        (_patch(Relay, "_keep_blobs", _nothing),),
        rare=True,
    ),
    Broken(
        "a worker that counts from what is stored",
        (_patch(simulated_workers, "next_sequence", _after_the_stored),),
        rare=True,
    ),
    Broken(
        "a worker that takes any object for its own group",
        (_patch(Uploader, "_store", _any_is_mine),),
        rare=True,
    ),
    Broken(
        "a trainer that does not read what was consumed",
        (_patch(simulated_workers, "read_history", lambda *_, **__: ()),),
    ),
    Broken(
        "retention that deletes groups after the last checkpoint",
        (_patch(RolloutRetention, "trim", _without_checkpoint),),
    ),
    Broken(
        "an intent that goes although a deletion got no answer",
        (_patch(gc_intents._Deletions, "all_answered", _always(True), create=True),),
        rare=True,
    ),
    Broken(
        "a publisher that waits only as long as deletions begin",
        (_patch(gc_intents, "margin_s", lambda _: 0.0),),
    ),
]

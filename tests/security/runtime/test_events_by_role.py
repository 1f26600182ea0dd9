"""An event counts only if the role of the process that recorded it writes events of its type."""

from __future__ import annotations

import time
from typing import get_args

import pytest
from numbered_events import numbered_event

from deltawire.dashboard.state import RunState
from deltawire.events import Event, Generated, Life, Published, Span, Swapped, encode_lines
from deltawire.runtime.event_tail import EventTail, own_events
from deltawire.store import open_bucket
from deltawire.wire import keys

NOW = time.time()


def published(process, version=9):
    return Published(
        process=process, version=version, at=NOW, bytes_delta=1, bytes_full=2, changed=1,
        elements=2, blocked_ms=1.0, encode_ms=1.0, upload_ms=1.0, bytes_anchor=0,
    )  # fmt: skip


def life(process, what="died"):
    return Life(process=process, at=NOW, role="worker", what=what)


def test_a_worker_says_nothing_of_what_the_trainer_published():
    bucket = open_bucket("memory://")
    own = numbered_event("w0", 3)
    bucket.put(keys.events("w0", 0), encode_lines([published("w0"), own]))
    bucket.put(keys.events("trainer", 0), encode_lines([published("trainer", 3)]))
    state = RunState()
    state.add(EventTail(bucket).read(everything=True))
    assert list(state.published) == [3]
    assert state.processes["w0"].version == 3


def test_a_supervisor_records_how_processes_ended_and_no_version():
    data = encode_lines([life("w0"), published("trainer")])
    assert own_events("supervisor", data) == [life("w0")]


@pytest.mark.parametrize("kind", get_args(Event))
def test_a_worker_writes_what_it_does_itself_and_nothing_of_other_roles(kind):
    """A new type is the trainer's or the evaluator's unless it is listed here."""
    assert (kind.written_by == frozenset()) == (kind in {Life, Span, Swapped, Generated})

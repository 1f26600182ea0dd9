"""The uploader of finished groups."""

from types import SimpleNamespace

import numpy as np

from deltawire.errors import BugError, InputError
from deltawire.rl.rollout.uploader import Uploader
from deltawire.wire import keys
from deltawire.wire.rollouts import Group, Trajectory


def group(task):
    drawn = Trajectory(
        np.array([1]), np.array([-1.0]), np.array([0]), np.ones(1, np.uint8), 0.0, "stop"
    )
    return Group("w", "n", task, 1.0, np.array([1]), [drawn])


def uploader(bucket):
    heartbeat = SimpleNamespace(count_finished=lambda: None)
    lease = SimpleNamespace(confirm=lambda **_: None, held=True)
    events = SimpleNamespace(record=lambda _: None)
    return Uploader(
        bucket, "w", 0, SimpleNamespace(heartbeat=heartbeat, lease=lease, events=events)
    )


def test_a_group_above_the_limit_is_refused_where_it_is_made(new_bucket, monkeypatch):
    """The trainer would drop it as damaged, one group after the other, and never say so here."""
    monkeypatch.setattr("deltawire.rl.rollout.uploader.MAX_GROUP_BYTES", 100)
    thread = uploader(new_bucket("memory"))
    thread.submit(group("large"))
    thread.start()
    thread.join(timeout=120)
    assert isinstance(thread.error, InputError)
    assert "the limit is 100" in str(thread.error)
    assert "rollout.group_size" in thread.error.hint


def test_a_group_that_cannot_be_stored_ends_the_uploader_with_an_error(new_bucket):
    """Otherwise the worker would sample forever and store nothing."""
    bucket = new_bucket("memory")
    thread = uploader(bucket)
    thread.submit(group("sound"))
    thread.submit(group("\ud800"))  # no format can store this text
    thread.start()
    thread.join(timeout=120)
    assert isinstance(thread.error, BugError)
    assert "cannot store a group: UnicodeEncodeError" in str(thread.error)
    assert thread.stored == 1
    assert bucket.exists(keys.rollout("w", 0))

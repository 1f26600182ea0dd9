"""`deltawire publish --watch` waits for a store that does not answer."""

import pytest
from checkpoint_dirs import write_directory

from deltawire.errors import InputError
from deltawire.launch import publish
from deltawire.launch.publish import PublishOptions, publish_directories
from deltawire.store import open_bare_bucket, retrying
from deltawire.sync import CheckpointWatcher, committed_versions
from deltawire.testing.faulty import FaultyBucket, disk_full


@pytest.fixture
def outage(tmp_path, monkeypatch):
    """Two checkpoints, a watcher of their folder, a store that fails, and the pauses of the
    process, which does not sleep."""
    for step in (1, 2):
        write_directory(tmp_path / "checkpoints" / f"checkpoint-{step}", step)
    bucket, pauses = FaultyBucket(open_bare_bucket("memory://")), []
    monkeypatch.setattr(publish, "open_bucket", lambda *_, **__: bucket)
    monkeypatch.setattr(retrying, "FIRST_PAUSE_S", 0.0)

    def sleep(seconds):
        pauses.append(seconds)
        if len(pauses) == 8:
            bucket.heal()

    monkeypatch.setattr(publish.time, "sleep", sleep)
    return CheckpointWatcher(tmp_path / "checkpoints", settle_s=0.0), bucket, pauses


@pytest.mark.parametrize("begins", ["at version 1", "once version 0 is committed"])
def test_a_watcher_publishes_what_came_during_an_outage(outage, capsys, begins):
    watcher, bucket, pauses = outage
    if begins == "at version 1":
        bucket.fail("create", "weights/manifests/*1.json", times=None)
    else:
        everything = lambda: bucket.fail(times=None)  # noqa: E731
        bucket.pause("create", "weights/manifests/*0.json", wait=everything, done=True)
    publish_directories("memory://", [], PublishOptions(), watcher=watcher, idle_s=1e-9)
    assert committed_versions(bucket) == [0, 1]
    assert pauses[:8] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    told = capsys.readouterr()
    assert (told.out + told.err).count("waits for the store") == 1


def test_another_error_ends_it(outage):
    watcher, bucket, pauses = outage
    bucket.fail("create", "weights/manifests/*1.json", times=None, error=disk_full)
    with pytest.raises(InputError, match="lack of space"):
        publish_directories("memory://", [], PublishOptions(), watcher=watcher)
    assert not pauses

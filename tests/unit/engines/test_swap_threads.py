"""Threads of the plugin that fail are noticed by those who poll the engine's status."""

import time

import pytest
import torch

from deltawire.engines.following.rank_group import RankGroup
from deltawire.engines.following.rank_weights import RankWeights
from deltawire.engines.following.settings import FollowSettings
from deltawire.engines.following.version_watcher import VersionWatcher
from deltawire.errors import InputError, RetryError
from deltawire.store import open_bare_bucket
from deltawire.testing.faulty import FaultyBucket
from deltawire.testing.tiny import start_publisher, weights
from deltawire.wire import keys


class PanicException(BaseException):
    """As a panic in Rust code arrives in Python: not an `Exception`."""


class Controller:
    """As much of a `SwapController` as its watcher sees."""

    wanted = 3
    broken = False

    def busy(self):
        if self.broken:
            raise RuntimeError("planted")
        return False


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("error", [PanicException("slice"), KeyError("x"), RetryError("no answer")])
def test_a_poll_that_fails_is_reported_and_repeated(error):
    bucket = FaultyBucket(open_bare_bucket("memory://"))
    publisher = start_publisher(bucket.inner)
    for version in range(6):
        publisher.publish(weights(version))
    publisher.close()
    # A key of anybody's is no version: the controller must not be led to it.
    bucket.inner.put(keys.manifest(9_999_999_999), b"junk")
    bucket.fail(times=None, error=lambda verb, key: error)
    controller = Controller()
    watcher = VersionWatcher(controller, bucket, polling=True)
    assert watcher.failure_now() == ""
    watcher.start()
    until(watcher.failure_now)
    assert str(error) in watcher.failure_now()
    assert watcher.is_alive()
    bucket.heal()
    until(lambda: not watcher.failure_now())
    until(lambda: controller.wanted == 5)
    watcher.close()
    assert not watcher.is_alive()
    assert watcher.failure_now() == ""  # It was asked to end.


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_watcher_is_reported(tmp_path):
    controller = Controller()
    controller.broken = True
    watcher = VersionWatcher(controller, open_bare_bucket(str(tmp_path)), polling=False)
    watcher.start()
    watcher.join(120)
    assert watcher.failure_now() == (
        "the thread that polls for versions has died: RuntimeError: planted"
    )


def test_a_run_of_another_model_is_refused_with_the_loaders_reason(tmp_path):
    bucket = open_bare_bucket(str(tmp_path), create=True)
    publisher = start_publisher(bucket)
    publisher.publish(weights(0))
    publisher.close()

    class Other(torch.nn.Module):
        def load_weights(self, weights):
            for _ in weights:
                raise RuntimeError("a size of 4 does not fit 5")

    with pytest.raises(InputError, match="a size of 4 does not fit 5") as refused:
        RankWeights(
            Other(),
            FollowSettings(run=str(tmp_path)),
            RankGroup(None, 0, 1),
            refuse=lambda placement: None,
            open_slot=lambda bucket, run: None,
        )
    assert "the model that the run publishes" in str(refused.value.hint)


def test_a_panic_while_preparing_is_the_ranks_failure():
    rank = object.__new__(RankWeights)
    rank._uncommitted, rank._failure, rank._prepared, rank._update = None, "", None, None

    class Panicking:
        def prepare_to(self, version):
            raise PanicException(f"version {version}")

    rank.subscriber, rank._thread = Panicking(), None
    rank.prepare(4)
    rank.wait()
    assert rank._failure == "cannot prepare: PanicException: version 4"

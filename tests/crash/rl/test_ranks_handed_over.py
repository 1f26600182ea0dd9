"""A run of two ranks goes from its trainer to a client's loop and back, to the same bits."""

import shutil
import signal

import pytest
from client_rank import datum
from rank_runs import begin, digests

from benchmarks.training.rank_runs import Start, run_starts
from deltawire.store import open_bucket
from deltawire.sync import newest_version
from deltawire.train import AdamParams, TrainingClient

pytestmark = [pytest.mark.drills, pytest.mark.long]


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    return begin(tmp_path_factory.mktemp("handover"), ranks=2)


@pytest.fixture(scope="module")
def stopped(begun, tmp_path_factory):
    """The run after its trainer was asked to stop in the middle."""
    bucket = copied(begun, tmp_path_factory.mktemp("stopped"))
    run_starts(bucket, [Start(rank=0, point="gradients", version=2, signal=signal.SIGTERM)])
    assert newest_version(bucket) == 2
    return bucket


def copied(bucket, folder):
    shutil.copytree(bucket.url.removeprefix("file://"), folder / "bucket")
    return open_bucket(str(folder / "bucket"))


def step(client, text):
    client.forward_backward([datum(text), datum("b" * 30), datum("cd")], "cross_entropy")
    client.optim_step(AdamParams(learning_rate=1e-3))
    client.save_weights_for_sampler().result()


def test_a_visit_changes_nothing(begun, stopped, tmp_path):
    (tmp_path / "whole").mkdir()
    whole, visited = copied(begun, tmp_path / "whole"), copied(stopped, tmp_path)
    run_starts(whole, [Start()])
    with TrainingClient.load(visited.url) as client:
        assert (client.ranks, client.version, client.notice) == (2, 2, "")
        client.forward([datum("abc")], "cross_entropy").result()
    run_starts(visited, [Start()])
    assert digests(visited) == digests(whole)


def test_the_optimizers_state_crosses_both_times(stopped, tmp_path):
    """A client with two steps, and two clients with one each, at the same place of a run."""
    found = []
    for name, visits in (("one", ["xyz xyz"]), ("two", [])):
        (tmp_path / name).mkdir()
        bucket = copied(stopped, tmp_path / name)
        with TrainingClient.load(bucket.url) as client:
            step(client, "hello")
            for text in visits:
                step(client, text)
        if not visits:
            with TrainingClient.load(bucket.url) as client:
                step(client, "xyz xyz")
        run_starts(bucket, [Start()])
        found.append(digests(bucket))
    assert found[0] == found[1]
    assert len(set(found[0])) == len(found[0]) > 5

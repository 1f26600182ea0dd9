"""A run's trainer under torchrun: each rank publishes its part, and one commit makes a version."""

import pytest
from rank_runs import VERSIONS, begin, digests, metadata_of, train

from deltawire.rl.evaluate.audit import audit_fates
from deltawire.runtime.fleet import read_trainer
from deltawire.sync import load_mirror, read_run
from deltawire.train.checkpoint_folders import checkpoint_versions

pytestmark = [pytest.mark.drills, pytest.mark.long]


def test_two_ranks_of_torchrun_train_and_publish_one_run(tmp_path):
    bucket = begin(tmp_path)
    train(bucket, torchrun=2)
    status = read_trainer(bucket)
    assert (status.phase, status.version) == ("finished", VERSIONS)
    assert [one.ranks for one in metadata_of(bucket)] == [2] * VERSIONS
    assert len(set(digests(bucket))) == VERSIONS + 1, "each step moves some weights"
    assert load_mirror(bucket, read_run(bucket)).digest.hex() == digests(bucket)[-1]
    assert checkpoint_versions(bucket) == [4, 6]
    fates = audit_fates(bucket, max_staleness=1000)
    assert (fates.consumed, fates.stored) == (2 * VERSIONS, 2 * VERSIONS)

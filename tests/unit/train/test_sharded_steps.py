"""Steps over ranks: the gradients of one process, to rounding, and its checkpoints."""

import numpy as np
import pytest
import rank_steps

GRADIENT = 1e-6
LOSS = 1e-4


def distance(left, right):
    """The relative L2 distance of two gradients, over all parameters."""
    assert left.keys() == right.keys()
    apart = sum(np.sum((left[k].astype(np.float64) - right[k]) ** 2) for k in left)
    return float(np.sqrt(apart / sum(np.sum(left[k].astype(np.float64) ** 2) for k in left)))


def assert_alike(one, many):
    (record, gradients), (theirs, others) = one, many
    assert distance(gradients, others) <= GRADIENT
    assert record["losses"] == pytest.approx(theirs["losses"], abs=LOSS)
    assert record["norms"] == pytest.approx(theirs["norms"], rel=1e-5)
    assert (record["tokens"], record["reward"]) == (theirs["tokens"], theirs["reward"])
    assert sorted(record["members"]) == sorted(theirs["members"])
    assert record["k3"] == pytest.approx(theirs["k3"], rel=1e-4)


def test_two_ranks_compute_one_process_step_and_share_its_checkpoint(tmp_path):
    """A mixture of experts with replayed routes: two ranks, then one from their checkpoint."""
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    task = {"model": "moe", "groups": 3}
    alone = rank_steps.run_steps(tmp_path / "alone", 1, **task, last=2)
    both = rank_steps.run_steps(tmp_path / "both", 2, **task, last=2, bucket=str(bucket))
    assert_alike(alone, both)
    further = rank_steps.run_steps(tmp_path / "a", 1, **task, first=2, last=3, bucket=str(bucket))
    straight = rank_steps.run_steps(tmp_path / "b", 1, **task, last=3)
    assert further[0]["losses"][0] == pytest.approx(straight[0]["losses"][2], abs=LOSS)


@pytest.mark.drills
@pytest.mark.parametrize("model", ["dense", "moe"])
def test_more_ranks_and_mixed_meshes_compute_the_same(tmp_path, model):
    """Ten steps on one process, its sharded twin, 2 and 4 ranks, and replicas of shards; twice."""
    task = {"model": model, "last": 10}
    alone = rank_steps.run_steps(tmp_path / "one", 1, **task)
    twin = rank_steps.run_steps(tmp_path / "twin", 1, **task, sharded=True)
    assert twin[0] == alone[0]
    for ranks, train in ((2, {}), (4, {}), (4, {"replicate": 2})):
        found = [
            rank_steps.run_steps(tmp_path / f"{ranks}-{number}", ranks, **task, train=train)
            for number in range(2)
        ]
        assert_alike(alone, found[0])
        assert found[0][0] == found[1][0], "a repetition gives the same bits"

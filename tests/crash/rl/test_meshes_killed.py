"""Tensor and expert parallelism in a run whose ranks are killed: the bits of a run whose ranks were
never killed, and another mesh continues from the same checkpoint."""

import shutil

import pytest
from rank_runs import begin, digests, metadata_of

from benchmarks.training.rank_runs import Start, run_starts
from benchmarks.training.resumed import last_state
from deltawire.runtime.fleet import read_trainer
from deltawire.store import open_bucket
from deltawire.sync import load_mirror, read_run

pytestmark = [pytest.mark.drills, pytest.mark.long]

VERSIONS = 4
MESHES = {
    "tensor": ("qwen3", 2, {"tensor_parallel": 2}),
    "expert": ("qwen3_moe", 2, {"expert_parallel": 2}),
    "both": ("qwen3_moe", 4, {"tensor_parallel": 2, "expert_parallel": 2}),
    "copies": ("qwen3_moe", 4, {"tensor_parallel": 2, "replicate": 2}),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_ranks_of_a_mesh_are_killed_and_continue_to_the_same_bits(tmp_path, mesh):
    family, ranks, axes = MESHES[mesh]
    bucket = begin(tmp_path, versions=VERSIONS, family=family, ranks=ranks, **axes)
    shutil.copytree(tmp_path / "bucket", tmp_path / "whole")
    whole = open_bucket(str(tmp_path / "whole"))
    run_starts(whole, [Start(ranks=ranks)])
    last = ranks - 1
    strikes = [
        Start(ranks=ranks, rank=last, point="gradients", version=2),
        Start(ranks=ranks, rank=last, point="save", version=2),
        Start(ranks=ranks, rank=0, point="committed", version=3),
    ]
    run_starts(bucket, [*strikes, Start(ranks=ranks)])
    assert len(set(digests(whole))) == VERSIONS + 1, "each step moves some weights"
    assert digests(bucket) == digests(whole)
    assert last_state(bucket, VERSIONS) == last_state(whole, VERSIONS)
    assert read_trainer(bucket).phase == "finished"
    assert load_mirror(bucket, read_run(bucket)).digest.hex() == digests(bucket)[-1]


@pytest.mark.parametrize(
    ("mesh", "others"), [("tensor", (4, 2)), ("expert", (4, 2)), ("both", (2, 4))]
)
def test_another_mesh_continues_the_run(tmp_path, mesh, others):
    """More replicas of a mesh, or fewer, read the checkpoint of version 2."""
    family, _, axes = MESHES[mesh]
    first, second = others
    if mesh == "both":
        axes = {"expert_parallel": 2}
    bucket = begin(tmp_path, versions=VERSIONS, family=family, ranks=first, **axes)
    begun = Start(ranks=first, rank=0, point="committed", version=3)
    run_starts(bucket, [begun, Start(ranks=second)])
    assert [one.ranks for one in metadata_of(bucket)] == [first] * 3 + [second]
    assert read_trainer(bucket).version == VERSIONS
    assert load_mirror(bucket, read_run(bucket)).digest.hex() == digests(bucket)[-1]

"""Ranks that publish quantized weights are killed, and other numbers of ranks continue."""

import shutil

import pytest
from rank_runs import VERSIONS, begin, digests, metadata_of

from benchmarks.training.rank_runs import Start, run_starts
from benchmarks.training.resumed import kill
from deltawire.cli.main import main
from deltawire.runtime.lines import line_bucket
from deltawire.store import open_bucket
from deltawire.sync import load_mirror, read_run

pytestmark = pytest.mark.drills

TRAIN = {"exporter": "fp8-block-f32", "optimizer": {"learning_rate": 1e-2}}
"""A matrix has 64 rows or fewer: both ranks hold rows of each block."""


def copied(begun, folder):
    folder.mkdir()
    shutil.copytree(begun.url.removeprefix("file://"), folder / "bucket")
    return open_bucket(str(folder / "bucket"))


@pytest.mark.parametrize(
    "axes",
    [
        pytest.param({}, id="rows"),
        pytest.param({"ranks": 2, "tensor_parallel": 2}, id="tensor", marks=pytest.mark.long),
    ],
)
def test_killed_ranks_publish_the_bits_of_ranks_that_were_not(tmp_path, axes):
    bucket = begin(tmp_path, **TRAIN, **axes)
    whole = copied(bucket, tmp_path / "whole")
    run_starts(whole, [Start()])
    assert len(set(digests(whole))) == VERSIONS + 1, "each step moves some codes"
    kills = [kill(0, "part", 2), kill(1, "waiting", 3), kill(0, "committed", 4)]
    run_starts(bucket, [*kills, Start()])
    assert digests(bucket) == digests(whole)
    assert main(["fsck", bucket.url]) == 0


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_another_number_of_ranks_continues(tmp_path, before, after):
    """Scales are read from the version that other ranks published."""
    bucket = begin(tmp_path, **TRAIN)
    run_starts(
        bucket, [Start(ranks=before, rank=0, point="committed", version=3), Start(ranks=after)]
    )
    assert [one.ranks for one in metadata_of(bucket)] == [before] * 3 + [after] * 3
    mirror = load_mirror(bucket, read_run(bucket))
    assert (mirror.version, mirror.digest.hex()) == (VERSIONS, digests(bucket)[-1])
    assert main(["fsck", bucket.url]) == 0


def test_killed_ranks_publish_both_precisions_of_each_version(tmp_path):
    """Rank 0 dies with a version in bf16 and not quantized, and rank 1 with neither."""
    bucket = begin(tmp_path, also_publish=["fp8-block-f32"], optimizer={"learning_rate": 1e-2})
    whole = copied(bucket, tmp_path / "whole")
    run_starts(whole, [Start()])
    run_starts(bucket, [kill(0, "committed", 2), kill(1, "part", 4), Start()])
    assert digests(bucket) == digests(whole)
    line = digests(line_bucket(bucket, "fp8-block-f32"))
    assert line == digests(line_bucket(whole, "fp8-block-f32"))
    assert len(set(line)) == VERSIONS + 1
    assert main(["fsck", bucket.url]) == 0

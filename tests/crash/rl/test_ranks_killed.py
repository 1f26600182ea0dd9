"""Any rank of a trainer may be killed at any moment: the run continues from its last commit, to the
bits of a run whose ranks were never killed, or it says that the bits are others."""

import shutil

import pytest
from rank_runs import VERSIONS, begin, digests, metadata_of

from benchmarks.training.rank_runs import Start, run_starts
from benchmarks.training.resumed import KILLS, kill, last_state
from deltawire.events import Life
from deltawire.rl.evaluate.audit import audit_fates
from deltawire.runtime.event_tail import EventTail
from deltawire.runtime.fleet import read_trainer
from deltawire.store import open_bucket
from deltawire.sync import load_mirror, read_run
from deltawire.train.checkpoint_folders import checkpoint_versions

WHOLE = Start()


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    return begin(tmp_path_factory.mktemp("killed"), dropout=True)


def copied(begun, tmp_path):
    shutil.copytree(begun.url.removeprefix("file://"), tmp_path / "bucket")
    return open_bucket(str(tmp_path / "bucket"))


@pytest.fixture(scope="module")
def uninterrupted(begun, tmp_path_factory):
    bucket = copied(begun, tmp_path_factory.mktemp("whole"))
    run_starts(bucket, [WHOLE])
    assert len(set(digests(bucket))) == VERSIONS + 1, "each step moves some weights"
    return digests(bucket)


def check_end(bucket, versions=VERSIONS):
    status = read_trainer(bucket)
    assert (status.phase, status.version) == ("finished", versions)
    assert load_mirror(bucket, read_run(bucket)).digest.hex() == digests(bucket)[-1]
    assert max(checkpoint_versions(bucket)) == versions
    fates = audit_fates(bucket, max_staleness=1000)
    assert (fates.consumed, fates.stored) == (2 * versions, 2 * versions)


def recomputed(bucket):
    """The trainers' events about the steps that they recomputed."""
    lives = [event for event in EventTail(bucket).read() if isinstance(event, Life)]
    return [one.detail for one in lives if one.detail.startswith("recomputed")]


def test_ranks_that_are_killed_continue_to_the_same_bits(begun, uninterrupted, tmp_path):
    bucket = copied(begun, tmp_path)
    run_starts(
        bucket,
        [
            kill(1, "gradients", 1),
            kill(0, "part", 2),
            kill(0, "committed", 4),
            kill(1, "save", 6),
            WHOLE,
        ],
    )
    assert digests(bucket) == uninterrupted
    assert {one.ranks for one in metadata_of(bucket)} == {2}
    check_end(bucket)
    assert recomputed(bucket)
    assert all("to the same bits" in one for one in recomputed(bucket))


@pytest.mark.drills
@pytest.mark.parametrize(
    ("family", "replicate"), [("qwen3", 2), pytest.param("qwen3_moe", 1, marks=pytest.mark.long)]
)
def test_every_rank_killed_at_every_point(tmp_path, family, replicate):
    begun = begin(tmp_path, versions=18, family=family, ranks=2, replicate=replicate)
    (tmp_path / "whole").mkdir()
    whole, bucket = copied(begun, tmp_path / "whole"), begun
    run_starts(whole, [WHOLE])
    run_starts(bucket, [*KILLS, WHOLE])
    assert digests(bucket) == digests(whole)
    assert last_state(bucket, 18) == last_state(whole, 18), "the optimizer's states too"
    check_end(bucket, 18)


@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param(1, 2, marks=[pytest.mark.drills, pytest.mark.long]), (2, 1)],
)
def test_another_number_of_ranks_continues_and_says_what_differs(
    begun, uninterrupted, tmp_path, before, after
):
    """The checkpoint of version 2 is read by other ranks; step 3 is computed again by them."""
    bucket = copied(begun, tmp_path)
    run_starts(
        bucket, [Start(ranks=before, rank=0, point="committed", version=3), Start(ranks=after)]
    )
    assert [one.ranks for one in metadata_of(bucket)] == [before] * 3 + [after] * 3
    check_end(bucket)
    (said,) = recomputed(bucket)
    assert said.startswith("recomputed steps 3 to 3, to ")
    if "other bits" in said:
        assert f"({after} ranks now, {before} before)" in said

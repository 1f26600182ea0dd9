"""Several adapters whose base is sharded over ranks: the bits of a single adapter's run, the base
once on each rank, and ranks that are killed."""

import shutil
import signal

import pytest
from adapter_lines import DENSE, EXPERTS, LINES, PACKED, VERSIONS, config_of, digests, start

from benchmarks.training.rank_runs import Start, run_starts
from benchmarks.training.resumed import kill
from deltawire.cli.main import main
from deltawire.runtime.lines import line_bucket
from deltawire.store import open_bucket
from deltawire.sync import load_mirror, read_history, read_run
from deltawire.train.checkpoint_folders import checkpoint_versions
from deltawire.wire.ledger import CommitMetadata

NAMES = [one["name"] for one in LINES]


def begun(folder, adapters=LINES, sizes=DENSE, number=0, **train):
    folder.mkdir(exist_ok=True)
    config = config_of(folder, adapters, **{"ranks": 2, "dropout": True, **train})
    return start(folder, config, sizes, number=number)


def copied(bucket, folder):
    shutil.copytree(bucket.url.removeprefix("file://"), folder)
    return open_bucket(str(folder))


def check_end(bucket):
    for name in NAMES:
        place = line_bucket(bucket, name)
        run = read_run(place)
        assert load_mirror(place, run).digest.hex() == digests(bucket, name)[-1]
        assert max(checkpoint_versions(place)) == VERSIONS
        history = list(read_history(place, run))
        made = [CommitMetadata.of(one.metadata, run="", version=one.version) for one in history]
        assert {one.ranks for one in made} == {2}
        assert len(set(digests(bucket, name))) == VERSIONS + 1, "each step moves some weights"
        assert main(["fsck", place.url]) == 0


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    return begun(tmp_path_factory.mktemp("lines"))


@pytest.fixture(scope="module")
def whole(first, tmp_path_factory):
    bucket = copied(first, tmp_path_factory.mktemp("whole") / "bucket")
    run_starts(bucket, [Start()])
    check_end(bucket)
    return bucket


@pytest.mark.drills
def test_a_killed_rank_continues_each_line_to_the_same_bits(first, whole, tmp_path):
    bucket = copied(first, tmp_path / "bucket")
    run_starts(bucket, [kill(1, "part", 2), Start()])
    check_end(bucket)
    for name in NAMES:
        assert digests(bucket, name) == digests(whole, name)


@pytest.mark.drills
@pytest.mark.long
def test_ranks_killed_at_many_points(first, whole, tmp_path):
    bucket = copied(first, tmp_path / "bucket")
    kills = [
        kill(0, "gradients", 1),
        kill(1, "encoding", 1),
        kill(0, "part", 1),
        kill(1, "save", 2),
        kill(0, "committed", 3),
    ]
    run_starts(bucket, [*kills, Start()])
    check_end(bucket)
    for name in NAMES:
        assert digests(bucket, name) == digests(whole, name)


@pytest.mark.drills
@pytest.mark.long
@pytest.mark.parametrize(
    ("adapters", "sizes", "train"),
    [
        (LINES, DENSE, {"replicate": 2}),
        (LINES, DENSE, {"compute": "bfloat16"}),
        (PACKED, EXPERTS, {}),
    ],
    ids=["replicas", "bf16", "packed experts"],
)
def test_a_line_has_the_bits_of_a_run_without_the_others(tmp_path, adapters, sizes, train):
    """The lines share the shards of the base; a line alone has nobody to share them with."""
    both = begun(tmp_path / "both", adapters, sizes, **train)
    run_starts(both, [Start()])
    check_end(both)
    for number, one in enumerate(adapters):
        folder = tmp_path / one["name"]
        single = begun(folder, [one], sizes, number=number, **train)
        run_starts(single, [Start()])
        assert digests(single, one["name"]) == digests(both, one["name"])


@pytest.mark.drills
@pytest.mark.long
def test_another_number_of_ranks_continues_each_line(first, tmp_path):
    bucket = copied(first, tmp_path / "bucket")
    stop = Start(ranks=1, rank=0, point="gradients", version=2, signal=signal.SIGTERM)
    run_starts(bucket, [stop, Start(ranks=2)])
    for name in NAMES:
        place = line_bucket(bucket, name)
        history = list(read_history(place, read_run(place)))
        made = [CommitMetadata.of(one.metadata, run="", version=one.version) for one in history]
        assert [one.ranks for one in made][-1] == 2
        assert len(made) == VERSIONS

"""A run's trajectories as Parquet: no row and no token is lost, and erased ones are left out."""

import json

import numpy as np
import pytest
from blake3 import blake3

from deltawire.cli.main import main
from deltawire.data.rows import open_rows
from deltawire.errors import BugError, CorruptError, InputError
from deltawire.launch.branches import dataset
from deltawire.launch.branches.dataset import export_dataset, read_groups
from deltawire.store import open_bucket
from deltawire.sync import read_run
from deltawire.testing.tiny import start_publisher, weights
from deltawire.wire import keys
from deltawire.wire.ledger import CommitMetadata
from deltawire.wire.lineage import Forgotten, LearnedAnswer, Lineage
from deltawire.wire.objects import encode_json
from deltawire.wire.retained import Retained
from deltawire.wire.rollouts import (
    BetterAnswer,
    Group,
    Reuse,
    Thinking,
    Trajectory,
    encode_group,
)

pytest.importorskip("pyarrow")

ODD_NAN = np.array([0x7FC00ABC], np.uint32).view(np.float32)[0]


def trajectory(rng, count=5, **facts):
    drawn = facts.pop("mask", np.ones(count, np.uint8))
    logprobs = -rng.random(count, np.float32)
    logprobs[drawn == 0] = ODD_NAN  # Undefined there, and still kept to the bit.
    return Trajectory(
        **{
            "tokens_T": rng.integers(0, 1 << 31, count).astype(np.int32),
            "logprobs_T": logprobs,
            "versions_T": rng.integers(0, 9, count).astype(np.int32),
            "mask_T": drawn,
            "reward": float(rng.random()),
            "finish": "stop",
            **facts,
        }
    )


def odd_group(rng, worker="w0"):
    """A group with each kind of trajectory that the format has."""
    thinking = Thinking(8, ((2, "answered"), (1, "forced")), ((1, 2), (3, 4)))
    forced = np.array([1, 0, 1, 0, 1], np.uint8)
    source = trajectory(rng, 6)
    count = 3
    reused = trajectory(rng, 6, mask=np.array([0, 0, 0, 1, 1, 1], np.uint8))
    for name in ("tokens_T", "logprobs_T", "versions_T"):
        getattr(reused, name)[:count] = getattr(source, name)[:count]
    empty = np.zeros(0, np.int32)
    own = rng.integers(0, 99, 4).astype(np.int32)
    return Group(
        worker, "n" * 8, "täsk\u2028", 0.7, rng.integers(0, 99, 3).astype(np.int32),
        [
            source,
            Trajectory(**{**reused.__dict__, "reuse": Reuse(0, count)}),
            trajectory(rng, 5, mask=forced, turns=2, thinking=thinking),
            trajectory(rng, 4, episode=3, prompt=own, reward=0.25, probes={"b": -0.0, "a": 1e300}),
            trajectory(rng, 4, episode=3, reward=0.25, routes=b"\x00\xff"),
            Trajectory(empty, empty.astype(np.float32), empty, empty.astype(np.uint8), 0.0, "error",
                       cause="the grader failed"),
            trajectory(rng, 3, episode=9, better=BetterAnswer(own, 0.25)),
        ],
        "family",
    )  # fmt: skip


class Trained:
    """A bucket with versions that consumed two groups each."""

    def __init__(self, place, versions=3):
        self.bucket = open_bucket(str(place), create=True)
        self.groups = {}
        rng = np.random.default_rng(0)
        with start_publisher(self.bucket) as publisher:
            publisher.publish(weights(0))
            for version in range(1, versions + 1):
                places, hashes = [], []
                for worker in ("w0", "w1"):
                    data = encode_group(odd_group(rng, worker))
                    self.bucket.put(keys.rollout(worker, version), data)
                    self.groups[worker, version] = data
                    places.append((worker, version))
                    hashes.append(blake3(data).hexdigest()[:32])
                step = CommitMetadata(step=version, consumed=places, hashes=hashes)
                publisher.publish(weights(version), metadata=step.to_dict())
                publisher.flush()
        self.run = read_run(self.bucket)

    def export(self, folder, **options):
        return export_dataset(self.bucket, self.run, folder, **options)


@pytest.fixture
def trained(tmp_path):
    return Trained(tmp_path / "run")


def test_every_group_comes_back_to_the_byte(trained, tmp_path):
    found = trained.export(tmp_path / "out", file_tokens=50)
    assert (found.groups, found.rows, found.versions) == (6, 42, 3)
    assert len(found.files) > 1
    rows = open_rows(tmp_path / "out")
    assert len(rows) == found.rows
    assert sum(len(rows[n]["tokens"]) for n in range(len(rows))) == found.tokens == 6 * 28
    again = {
        (group.worker, sequence): encode_group(group)
        for group, sequence, _ in read_groups(tmp_path / "out")
    }
    assert again == trained.groups
    assert [rows[n]["version"] for n in range(0, 42, 14)] == [1, 2, 3]


def test_the_library_for_datasets_reads_every_row(trained, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    found = trained.export(tmp_path / "out", file_tokens=50)
    cache = str(tmp_path / "cache")
    table = datasets.load_dataset(str(tmp_path / "out"), split="train", cache_dir=cache)
    rows = open_rows(tmp_path / "out")
    assert len(table) == found.rows
    for number in (0, 3, 35):
        assert table[number]["tokens"] == rows[number]["tokens"]
        assert table[number]["probes"] == rows[number]["probes"]


def test_a_range_of_versions_is_written(trained, tmp_path, capsys):
    place = str(tmp_path / "out")
    words = ["dataset", trained.bucket.url, "--to", place]
    assert main([*words, "--first", "2", "--last", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 14
    assert {sequence for _, sequence, _ in read_groups(tmp_path / "out")} == {2}
    assert main(words) == 2
    assert "is not empty" in capsys.readouterr().err
    assert main([*words, "--first", "3", "--last", "2"]) == 2
    assert main(["dataset", trained.bucket.url, "--to", place + "2", "--first", "9"]) == 2
    assert "there is no group to write" in capsys.readouterr().err
    assert main(["dataset", trained.bucket.url, "--to", place + "3"]) == 0
    assert "trajectories: 42 of 6 groups" in capsys.readouterr().out


def test_groups_of_forgotten_users_are_left_out(trained, tmp_path):
    """Also where the group's object has not been deleted yet."""
    record = Forgotten(run=trained.run.id, user="ab" * 16, at=0.0, groups=[("w0", 1), ("w1", 2)])
    trained.bucket.put(keys.live_forgotten(record.user), encode_json(record))
    trained.bucket.delete(keys.rollout("w0", 1))
    found = trained.export(tmp_path / "out")
    assert (found.groups, found.erased) == (4, 2)
    assert not {("w0", 1), ("w1", 2)} & {
        (group.worker, sequence) for group, sequence, _ in read_groups(tmp_path / "out")
    }


def test_deleted_groups_are_counted_and_missing_ones_are_an_error(trained, tmp_path):
    trained.bucket.delete(keys.rollout("w0", 1))
    with pytest.raises(CorruptError, match="a consumed group is missing"):
        trained.export(tmp_path / "out")
    trained.bucket.put(keys.RETAINED, encode_json(Retained(rollouts=2)))
    assert trained.export(tmp_path / "second").deleted == 1


def test_another_group_under_the_same_name_is_an_error(trained, tmp_path):
    trained.bucket.put(keys.rollout("w0", 1), trained.groups["w0", 2])
    with pytest.raises(CorruptError):
        trained.export(tmp_path / "out")


def test_a_file_that_lost_something_does_not_count(trained, tmp_path, monkeypatch):
    as_lists = dataset._as_lists
    monkeypatch.setattr(dataset, "_as_lists", lambda row: as_lists(row) | {"temperature": 1.0})
    with pytest.raises(BugError, match="to the byte"):
        trained.export(tmp_path / "out")


def test_answers_of_a_learners_group_are_named_without_their_users(tmp_path):
    rng = np.random.default_rng(1)
    bucket = open_bucket(str(tmp_path / "run"), create=True)
    group = Group(
        "live", "n", "live", 1.0, np.arange(2, dtype=np.int32),
        [trajectory(rng), trajectory(rng)], "live",
    )  # fmt: skip
    bucket.put(keys.rollout("live", 0), encode_group(group))
    answers = [LearnedAnswer(f"{n:032x}", "cd" * 16, 1.0, 0.5, 1.0, 2.0) for n in (7, 8)]
    lineage = Lineage(worker="live", sequence=0, at=0.0, answers=answers)
    bucket.put(keys.live_lineage("live", 0), encode_json(lineage))
    with start_publisher(bucket) as publisher:
        publisher.publish(weights(0))
        step = CommitMetadata(step=1, consumed=[("live", 0)])
        publisher.publish(weights(1), metadata=step.to_dict())
    export_dataset(bucket, read_run(bucket), tmp_path / "out")
    rows = open_rows(tmp_path / "out")
    assert [rows[n]["answer"] for n in range(2)] == [f"{n:032x}" for n in (7, 8)]
    assert "cd" * 16 not in str(rows[0])


def test_a_damaged_erasure_stops_the_export(trained, tmp_path):
    trained.bucket.put(keys.live_forgotten("ab" * 16), b"{}")
    with pytest.raises(CorruptError):
        trained.export(tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_a_folder_that_cannot_be_made_is_one_error(trained, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write to"):
        trained.export(tmp_path / "file" / "out")

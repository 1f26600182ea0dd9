"""A fork trains on as its parent would, whoever stops and whatever its parent deletes."""

import json
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from forgotten_users import BOB, CAROL, everything_in, tokens_of, train
from granted_groups import copied, made_up_group, put_group, start_with_groups
from heartbeats import put_heartbeat
from live_answers import answer, put_rows

from deltawire.cli import forget
from deltawire.cli.main import main
from deltawire.config import run_config
from deltawire.errors import CorruptError, DeltawireError, InputError
from deltawire.events import Evaluated
from deltawire.launch.branches.fork_places import forks_from
from deltawire.launch.branches.forking import Fork, fork_run
from deltawire.launch.fork_erasure import forget_in_forks
from deltawire.launch.live_users import Erasure
from deltawire.rl.evaluate.evaluator import run_evaluator
from deltawire.rl.trainer.bootstrap import start_run
from deltawire.rl.trainer.verify_intervals import verify_intervals
from deltawire.runtime.event_tail import events_of
from deltawire.runtime.process import Process
from deltawire.store import open_bare_bucket, open_bucket, retrying
from deltawire.store.delegating import DelegatingBucket
from deltawire.sync import find_run, load_mirror, prune, read_manifest, read_run
from deltawire.sync.chain.first_version import first_version
from deltawire.sync.chain.tags import add_tag, find_tag
from deltawire.sync.maintain.fsck import check_run
from deltawire.testing.faulty import FaultyBucket
from deltawire.train import checkpoint_commit, checkpoint_folders
from deltawire.train.checkpoint_folders import checkpoint_versions
from deltawire.wire import keys
from deltawire.wire.ledger import FORK_RECORD
from deltawire.wire.lineage import Forgotten

TRAIN = {
    "groups_per_step": 1, "max_staleness": 99, "versions": 4, "checkpoint_every": 2,
    "anchor_every": 100,
}  # fmt: skip
VERSION = 2


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of four versions, with checkpoints at 2 and 4, in a folder that tests copy."""
    folder = tmp_path_factory.mktemp("trained")
    bucket = start_with_groups(folder, groups=4, train=TRAIN)
    train(bucket, to=4)
    return bucket


@pytest.fixture
def parent(trained, tmp_path):
    """A copy of the run."""
    return copied(trained, str(tmp_path / "run"))


def stored(bucket):
    return {one.key: one.bytes for one in bucket.list_objects("")}


def give_later_groups(fork, *numbers):
    """The groups that the parent trained on after the fork, as the first of the fork's worker."""
    for place, number in enumerate(numbers):
        put_group(fork, place, made_up_group(number))
    put_heartbeat(fork, "w0", stored=len(numbers), at=time.time())


def urls_from(bucket, version):
    return [one.url for one in forks_from(bucket, version)]


def digests(bucket, *versions):
    return [read_manifest(bucket, read_run(bucket), version).digest for version in versions]


def test_a_fork_makes_the_bits_of_its_parent_from_the_later_groups(parent):
    made = fork_run(parent, read_run(parent), VERSION, "try")
    assert (made.version, made.state) == (VERSION, "shared")
    fork = open_bare_bucket(made.url)
    inner = stored(fork)
    assert sum(inner.values()) < 100_000
    assert not [key for key in inner if key.startswith((keys.BLOBS, "rollouts/"))]
    assert not [key for key in inner if key.endswith(".bin")]
    config = run_config(made.run.config, url=made.url)
    assert start_run(fork, config, Path(config.model.path)).id == made.run.id
    give_later_groups(fork, 2, 3)
    train(fork, to=4)
    assert digests(fork, 3, 4) == digests(parent, 3, 4)
    assert read_manifest(fork, made.run, 2).metadata[FORK_RECORD] == {
        "parent": read_run(parent).id, "version": VERSION,
    }  # fmt: skip
    assert not check_run(fork, deep=True).faults
    assert main(["replay", made.url, "--from", "3"]) == 0
    # The versions that it began with were trained in its parent.
    check = verify_intervals(fork)
    assert check.exact
    assert [(one.origin, one.last) for one in check.checked] == [(VERSION, 4)]


def test_a_fork_that_shares_a_state_needs_no_tensor_library():
    """Importing it takes ten times as long as the fork."""
    code = "import sys, deltawire.launch.branches.fork_state; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_evaluators_begin_with_the_first_version_of_the_fork(parent, tmp_path):
    """A fork has its parent's versions from an anchor on: they are not its own, and version 0 may
    not be there."""
    anchored = start_with_groups(tmp_path / "anchored", groups=4, train=TRAIN | {"anchor_every": 1})
    train(anchored, to=4)
    for run in (parent, anchored):
        assert first_version(run, read_run(run)) == 0
        fork = open_bucket(fork_run(run, read_run(run), VERSION, "try").url)
        assert first_version(fork, read_run(fork)) == VERSION
        give_later_groups(fork, 2, 3)
        train(fork, to=4)
        assert first_version(fork, read_run(fork)) == VERSION
    assert evaluate(fork)[-1] == 4
    # One that is started after retention has measured nothing yet.
    prune(anchored, read_run(anchored), cutoff=4, grace_s=0)
    first = first_version(anchored, read_run(anchored))
    assert first > 0
    assert load_mirror(anchored, read_run(anchored), at=first).version == first


def test_an_evaluator_that_stood_still_goes_on_with_what_retention_kept(tmp_path):
    run = start_with_groups(tmp_path, groups=4, train=TRAIN | {"anchor_every": 1})
    train(run, to=1)
    assert evaluate(run)[-1] == 1
    train(run, to=4)
    prune(run, read_run(run), cutoff=4, grace_s=0)
    assert first_version(run, read_run(run)) == 2
    assert evaluate(run)[-1] == 4


def evaluate(run):
    """Runs an evaluator to the run's end; returns the versions that were measured."""
    process = Process(run, "evaluator", "evaluator", supervised=False)
    run_evaluator(process)
    process.events.flush()
    return sorted(one.version for one in events_of(run, "evaluator") if isinstance(one, Evaluated))


def test_other_settings_make_other_bits(parent, capsys):
    change = "train.optimizer.learning_rate=0.1"
    assert main(["fork", f"{parent.url}@{VERSION}", "try", "--set", change]) == 0
    assert "state is shared" in capsys.readouterr().out
    fork = open_bare_bucket(f"{parent.url}/forks/try")
    give_later_groups(fork, 2)
    train(fork, to=3)
    assert digests(fork, 2) == digests(parent, 2)
    assert digests(fork, 3) != digests(parent, 3)
    assert main(["fork", f"{parent.url}@{VERSION}", "try"]) == 2
    assert "another fork has this name" in capsys.readouterr().err


def test_without_a_checkpoint_the_state_is_computed(parent):
    made = fork_run(parent, read_run(parent), 3, "try")
    assert made.state == "computed"
    fork = open_bare_bucket(made.url)
    assert checkpoint_versions(fork) == [3]
    give_later_groups(fork, 3)
    train(fork, to=4)
    assert digests(fork, 4) == digests(parent, 4)


def test_a_fork_of_a_fork(parent):
    first = fork_run(parent, read_run(parent), VERSION, "one")
    fork = open_bare_bucket(first.url)
    give_later_groups(fork, 2)
    train(fork, to=3)
    second = fork_run(fork, first.run, 3, "two")
    below = open_bare_bucket(second.url)
    give_later_groups(below, 3)
    train(below, to=4)
    assert digests(below, 4) == digests(parent, 4)


def test_retention_of_the_parent_keeps_what_a_fork_reads(parent):
    run = read_run(parent)
    made = fork_run(parent, run, VERSION, "try")
    for key in parent.list(f"{keys.CHECKPOINTS}0000000004/"):
        parent.put(key.replace("0000000004", "0000000005"), parent.get(key, limit=1 << 30))
    checkpoint_folders.remove_old(parent, 1)
    assert prune(parent, run, cutoff=4, grace_s=0).pruned_below <= VERSION
    assert 4 not in checkpoint_versions(parent)
    fork = open_bare_bucket(made.url)
    give_later_groups(fork, 2)
    train(fork, to=3)
    assert digests(fork, 3) == digests(parent, 3)


def test_a_checkpoint_that_is_removed_meanwhile_is_not_half_shared(parent):
    """Its removal began before the fork's mark: the fork finds no commit, or its parts stay."""
    for at in range(1, 12):
        bucket = FaultyBucket(copied(parent, f"{parent.url}-{at}"))
        made = []
        bucket.pause(
            at=at,
            wait=lambda b=bucket, m=made: m.append(
                fork_run(b.inner, read_run(b.inner), VERSION, "try")
            ),
        )
        checkpoint_folders.remove_old(bucket, 1)
        if not made:
            break
        commits = checkpoint_versions(open_bare_bucket(made[0].url))
        assert commits == [VERSION]
        assert_has_state(made[0])
    assert at > 5


def assert_has_state(made):
    """All parts that the fork's commit names are read, here or above."""
    fork = open_bare_bucket(made.url)
    key = keys.checkpoint_commit(made.version)
    commit = checkpoint_commit.Commit.decode(fork.get(key, limit=1 << 24), run=made.url, key=key)
    parts = {keys.checkpoint_part(made.version, n) for n in range(commit.ranks)}
    assert [part for part in parts if fork.get(part, limit=1 << 30) is None] == []


@pytest.mark.parametrize(
    "done", [False, pytest.param(True, marks=pytest.mark.drills)], ids=["before", "after"]
)
def test_each_request_to_the_parent_fails(parent, done, monkeypatch):
    """The same call goes on; before it does, no reader takes the place for a run."""
    monkeypatch.setattr(retrying, "FIRST_PAUSE_S", 0.0)
    run, at, ended = read_run(parent), 0, False
    while not ended:
        at += 1
        name = f"try{at}"
        bucket = FaultyBucket(parent)
        bucket.fail(at=at, times=None, done=done)
        with suppress(DeltawireError):
            fork_run(bucket, run, VERSION, name)
            ended = len(bucket.operations) < at
        fork = open_bare_bucket(f"{parent.url}/forks/{name}", create=True)
        if not ended:
            assert find_run(fork) is None
        assert fork_run(parent, run, VERSION, name).state == "shared"
        assert load_mirror(fork, read_run(fork)).digest.hex() == digests(parent, VERSION)[0]
        assert find_tag(parent, run, f"fork-{name}").version == VERSION
    assert at > 5


def test_forks_that_hold_what_a_version_learned_are_named(parent):
    first = fork_run(parent, read_run(parent), VERSION, "one")
    fork = open_bare_bucket(first.url)
    second = fork_run(fork, first.run, VERSION, "two")
    assert urls_from(parent, VERSION) == [first.url, second.url]
    assert urls_from(parent, VERSION + 1) == []
    fork.put(keys.manifest(VERSION), b"junk")  # Then it is unknown, and counts.
    assert urls_from(parent, VERSION + 1) == [first.url, second.url]


@pytest.mark.parametrize(
    ("version", "name", "settings", "message"),
    [
        (9, "try", {}, "is not committed"),
        (2, "a/b", {}, "cannot name"),
        (2, "x" * 60, {}, "cannot name"),
        (2, "try", {"model.path": "x"}, "cannot change"),
    ],
)
def test_what_cannot_be_forked(parent, version, name, settings, message):
    with pytest.raises(InputError, match=message):
        fork_run(parent, read_run(parent), version, name, settings=settings)
    assert not parent.list(keys.TAGS)


def test_a_fork_in_another_bucket_needs_nothing_of_its_parent(parent, tmp_path, capsys):
    """It makes the parent's bits after the parent is gone."""
    to = str(tmp_path / "elsewhere")
    assert main(["fork", f"{parent.url}@{VERSION}", "try", "--to", to]) == 0
    assert "the trainer's state was copied" in capsys.readouterr().out
    later = digests(parent, 3, 4)
    assert urls_from(parent, VERSION) == [open_bare_bucket(to).url]
    assert find_tag(parent, read_run(parent), "fork-try") is None
    assert not [key for key in parent.list(keys.CHECKPOINTS) if "fork-" in key]
    again = fork_run(parent, read_run(parent), VERSION, "try", to=to)
    assert (again.state, again.url) == ("copied", open_bare_bucket(to).url)
    for key in parent.list(""):
        parent.delete(key)
    fork = open_bare_bucket(to)
    give_later_groups(fork, 2, 3)
    train(fork, to=4)
    assert digests(fork, 3, 4) == later
    assert not check_run(fork, deep=True).faults
    assert verify_intervals(fork).began == VERSION


@pytest.mark.parametrize(
    "done", [False, pytest.param(True, marks=pytest.mark.drills)], ids=["before", "after"]
)
def test_each_request_of_a_copy_fails(parent, tmp_path, done, monkeypatch):
    """The same call goes on; before that the place holds no run, and the parent names the fork."""
    monkeypatch.setattr(retrying, "FIRST_PAUSE_S", 0.0)
    run, at, ended = read_run(parent), 0, False
    while not ended:
        at += 1
        to, name = str(tmp_path / f"to{at}"), f"try{at}"
        bucket = FaultyBucket(parent)
        bucket.fail(at=at, times=None, done=done)
        with suppress(DeltawireError):
            fork_run(bucket, run, VERSION, name, to=to)
            ended = len(bucket.operations) < at
        place = open_bare_bucket(to, create=True)
        if place.list(keys.BLOBS):
            assert place.url in urls_from(parent, VERSION)
        fork_run(parent, run, VERSION, name, to=to)
        assert load_mirror(place, read_run(place)).digest.hex() == digests(parent, VERSION)[0]
        assert_has_state(Fork(to, read_run(place), VERSION, "copied"))
    assert at > 8


def test_an_erasure_names_forks_elsewhere(parent, tmp_path):
    to = str(tmp_path / "elsewhere")
    fork_run(parent, read_run(parent), VERSION, "try", to=to)
    assert urls_from(parent, VERSION + 1) == []
    assert urls_from(parent, 1) == [open_bare_bucket(to).url]
    record = Forgotten(run=read_run(parent).id, user="b0" * 16, at=0.0)
    done = Erasure(record, [], known=True, old_versions="none", forks=forks_from(parent, 1))
    assert f"its note {parent.list(keys.CHILDREN)[0]}" in " ".join(forget._lines(done, []))
    parent.put(keys.child("odd"), b"junk")  # Then it is unknown, and counts.
    assert keys.child("odd") in urls_from(parent, VERSION + 1)


def test_a_damaged_part_is_not_copied(parent, tmp_path):
    key = keys.checkpoint_part(VERSION, 0)
    data = bytearray(parent.get(key, limit=1 << 24))
    data[-1] ^= 1
    parent.put(key, bytes(data))
    with pytest.raises(CorruptError, match="a part of the trainer's state"):
        fork_run(parent, read_run(parent), VERSION, "try", to=str(tmp_path / "elsewhere"))


def test_places_that_no_fork_is_copied_to(parent, tmp_path):
    for to in (parent.url, f"{parent.url}/forks/other"):
        with pytest.raises(InputError, match=r"own bucket|place of a fork"):
            fork_run(parent, read_run(parent), VERSION, "try", to=to)
    fork_run(parent, read_run(parent), VERSION, "try", to=str(tmp_path / "one"))
    with pytest.raises(InputError, match="another fork has this name"):
        fork_run(parent, read_run(parent), 4, "try", to=str(tmp_path / "one"))


def test_a_copy_of_the_same_name_takes_nothing_from_a_fork_below(parent, tmp_path):
    run = read_run(parent)
    below = fork_run(parent, run, VERSION, "try")
    kept = [find_tag(parent, run, "fork-try"), parent.list(keys.CHECKPOINTS)]
    copies = [fork_run(parent, run, VERSION, "try", to=str(tmp_path / one)) for one in ("a", "b")]
    assert [find_tag(parent, run, "fork-try"), parent.list(keys.CHECKPOINTS)] == kept
    assert len({one.run.id for one in (below, *copies)}) == 3
    assert set(urls_from(parent, VERSION)) == {one.url for one in (below, *copies)}


def test_a_refused_copy_leaves_nothing_in_its_parent(parent, tmp_path):
    """Its note stays if weights are in the other bucket already."""
    run, to = read_run(parent), tmp_path / "elsewhere"
    for noted in (0, 1):
        with pytest.raises(InputError, match="is not committed"):
            fork_run(parent, run, 9, "try", to=str(to))
        assert len(parent.list(keys.CHILDREN)) == noted
        assert not parent.list(keys.TAGS)
        open_bare_bucket(str(to)).put(keys.blob("5e" * 32), b"")


class ShortAnswers(DelegatingBucket):
    """A bucket whose first listing comes back empty, and whose first read finds nothing."""

    poll_s = 0.0

    def __init__(self, inner):
        super().__init__(inner)
        self.listed, self.read = set(), set()

    def list(self, prefix="", *, after=None):
        first = prefix not in self.listed
        self.listed.add(prefix)
        return [] if first else self.inner.list(prefix, after=after)

    def list_prefixes(self, prefix):
        first = prefix not in self.listed
        self.listed.add(prefix)
        return [] if first else self.inner.list_prefixes(prefix)

    def get(self, key, *, limit):
        first = key not in self.read
        self.read.add(key)
        return None if first else self.inner.get(key, limit=limit)


def test_a_short_answer_hides_no_fork(parent, tmp_path):
    run = read_run(parent)
    copy = fork_run(parent, run, VERSION, "try", to=str(tmp_path / "elsewhere"))
    below = fork_run(parent, run, VERSION, "two")
    assert urls_from(ShortAnswers(parent), VERSION) == [copy.url, below.url]
    parent.put(keys.child("odd"), b"x" * 100_000)
    assert keys.child("odd") in urls_from(parent, VERSION)


def test_the_tree_is_drawn(parent, tmp_path, capsys):
    run = read_run(parent)
    first = fork_run(parent, run, VERSION, "one")
    fork_run(open_bare_bucket(first.url), first.run, VERSION, "below")
    copy = fork_run(parent, run, 4, "two", to=str(tmp_path / "elsewhere"))
    add_tag(parent, run, 3, "best")
    assert main(["log", parent.url, "--graph"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "granted 0 to 4 · best @3"
    assert [line.strip("│├└─ ").split()[0] for line in lines[1:]] == ["2", "2", "4"]
    assert lines[2].startswith("│   └── 2 ─▶ below to 2")
    assert f"{copy.url} (in another bucket)" in lines[3]
    assert main(["log", parent.url, "--graph", "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert [one["began"] for one in tree["forks"]] == [VERSION, 4]
    open_bare_bucket(first.url).put(keys.manifest(VERSION), b"junk")
    assert main(["log", parent.url, "--graph"]) == 0
    assert "? ─▶ one" in capsys.readouterr().out


def test_a_long_computation_is_announced(parent, capsys):
    assert main(["fork", f"{parent.url}@3", "try"]) == 0
    said = capsys.readouterr().err
    assert "version 3 has no stored state: computing 1 step after version 2 again" in said
    assert "which took the trainer about" in said


def test_an_erasure_reaches_forks_in_the_bucket(parent):
    """Rows that a fork's own gateways stored under the same pseudonyms are deleted there too."""
    made = fork_run(parent, read_run(parent), VERSION, "one")
    fork = open_bare_bucket(made.url)
    put_rows(fork, 0, [answer(n, user=BOB if n < 3 else CAROL) for n in range(1, 5)], [])
    unfinished = open_bare_bucket(f"{parent.url}/forks/two", create=True)
    unfinished.put(keys.manifest(VERSION), b"")
    found = {one.url: one for one in forget_in_forks(parent, [BOB])}
    assert (found[fork.url].answers, found[fork.url].failure) == (2, "")
    assert found[unfinished.url].answers == 0
    assert tokens_of(1) not in everything_in(fork)
    assert tokens_of(3) in everything_in(fork)
    assert fork.exists(keys.live_forgotten(BOB))
    record = Forgotten(run=read_run(parent).id, user=BOB, at=0.0)
    done = Erasure(record, [BOB], known=True, old_versions="none", in_forks=[*found.values()])
    assert not done.unfinished
    assert f"in the fork {fork.url}: deleted 2 answers" in " ".join(forget._lines(done, []))
    fork.put("run.json", b"junk")
    (failed,) = [one for one in forget_in_forks(parent, [BOB]) if one.failure]
    done = replace(done, in_forks=[failed])
    assert done.unfinished
    assert "still holds the user" in " ".join(forget._lines(done, []))

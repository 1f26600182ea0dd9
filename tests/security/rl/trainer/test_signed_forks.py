"""A signed run is forked by its owner, and the fork is signed for itself."""

import time

import pytest
from forgotten_users import train
from granted_groups import UNCHECKED, made_up_group, put_group
from heartbeats import put_heartbeat
from signed_run import OTHER, OWNER, WORKER

from deltawire.cli.main import main
from deltawire.config import BuildConfig, parse_config
from deltawire.errors import InputError, SignatureError
from deltawire.export.models import save_model
from deltawire.launch.branches.forking import fork_run
from deltawire.rl.trainer.bootstrap import start_run
from deltawire.rl.trainer.verify_intervals import verify_intervals
from deltawire.runtime.signed_bucket import grant_role
from deltawire.runtime.trusted import ReaderTrust, open_as_trainer, open_trusted
from deltawire.store import open_bucket
from deltawire.sync import read_manifest, read_run
from deltawire.sync.maintain.fsck import check_run
from deltawire.train.build import build_model, byte_tokenizer
from deltawire.wire import keys
from deltawire.wire.roles import Pin

pytestmark = pytest.mark.drills

TRAIN = {
    "groups_per_step": 1, "max_staleness": 99, "versions": 4, "checkpoint_every": 2,
    "anchor_every": 100, "also_publish": ["fp8-block"],
}  # fmt: skip


def owned(place):
    """The bucket as the owner's trainer has it."""
    return open_as_trainer(open_bucket(str(place)), OWNER)


def give_groups(place, *numbers):
    """Stores groups of a worker, signed by its key."""
    run = read_run(place)
    grant_role(place.inner, OWNER, run_id=run.id, role="worker-w0", public_key=WORKER.public_key)
    pin = ReaderTrust(pin=Pin(OWNER.public_key, run.id))
    worker = open_trusted(place.url, pin, signer=WORKER, role="worker-w0")
    for at, number in enumerate(numbers):
        put_group(Signing(place, worker), at, made_up_group(number))
    put_heartbeat(worker, "w0", stored=len(numbers), at=time.time())


class Signing:
    """Stores groups as the worker, and the worker's challenge as the trainer."""

    def __init__(self, trainer, worker):
        self._trainer, self._worker = trainer, worker

    def get(self, key, *, limit):
        return self._trainer.get(key, limit=limit)

    def put(self, key, data):
        (self._trainer if key.startswith(keys.CHALLENGES) else self._worker).put(key, data)


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    """A signed run of four versions, with states at 2 and 4 and a line."""
    folder = tmp_path_factory.mktemp("signed")
    sizes = BuildConfig(hidden_size=32, layers=1, head_size=16, feed_forward_size=48, context=64)
    save_model(build_model(sizes, seed=0), byte_tokenizer(), folder / "model")
    raw = {
        "name": "signed", "model": {"path": str(folder / "model")}, "train": TRAIN,
        "trust": UNCHECKED,
    }  # fmt: skip
    plain = open_bucket(str(folder / "bucket"), create=True)
    start_run(plain, parse_config(raw, source="test"), folder / "model", signer=OWNER)
    bucket = owned(plain.url)
    give_groups(bucket, 0, 1, 2, 3)
    train(bucket, to=4, signer=OWNER)
    return bucket


def digests(bucket, *versions):
    return [read_manifest(bucket, read_run(bucket), version).digest for version in versions]


def test_a_signed_fork_makes_the_bits_of_its_parent(parent):
    made = fork_run(parent, read_run(parent), 2, "try", signer=OWNER)
    assert made.state == "shared"
    fork = owned(made.url)
    give_groups(fork, 2, 3)
    train(fork, to=4, signer=OWNER)
    assert digests(fork, 3, 4) == digests(parent, 3, 4)
    assert verify_intervals(fork).exact
    line = open_trusted(f"{made.url}/lines/fp8-block", ReaderTrust(Pin(OWNER.public_key, "")))
    for place in (fork, line):
        assert not check_run(place, deep=True).faults


def test_without_a_state_it_is_computed(parent):
    made = fork_run(parent, read_run(parent), 3, "later", signer=OWNER)
    assert made.state == "computed"
    fork = owned(made.url)
    give_groups(fork, 3)
    train(fork, to=4, signer=OWNER)
    assert digests(fork, 4) == digests(parent, 4)


def test_a_copy_elsewhere_is_signed_too(parent, tmp_path):
    made = fork_run(
        open_bucket(parent.url), read_run(parent), 2, "copy", signer=OWNER, to=str(tmp_path / "to")
    )
    fork = owned(made.url)
    assert made.state == "copied"
    give_groups(fork, 2)
    train(fork, to=3, signer=OWNER)
    assert digests(fork, 3) == digests(parent, 3)


@pytest.mark.parametrize("signer", [None, OTHER], ids=["none", "another"])
def test_nobody_else_forks_it(parent, signer, tmp_path):
    before = parent.list("")
    for to in ("", str(tmp_path / "to")):
        with pytest.raises(InputError, match="signed with another key"):
            fork_run(parent, read_run(parent), 2, "theirs", signer=signer, to=to)
        assert parent.list("") == before


def test_the_state_of_the_parent_is_none_of_the_fork(parent):
    """Its signature is for the parent, at the same key."""
    made = fork_run(parent, read_run(parent), 2, "swapped", signer=OWNER)
    key = keys.checkpoint_commit(2)
    open_bucket(made.url).put(key, parent.inner.get(key, limit=1 << 24))
    with pytest.raises(SignatureError):
        owned(made.url).get(key, limit=1 << 24)


def test_the_command_takes_the_owners_key(parent, tmp_path, capsys):
    OWNER.write(tmp_path / "owner.key")
    assert main(["fork", f"{parent.url}@2", "typed"]) == 2
    assert "signed with another key" in capsys.readouterr().err
    key = ["--key", str(tmp_path / "owner.key")]
    assert main(["fork", f"{parent.url}@2", "typed", *key]) == 0
    assert "state is shared" in capsys.readouterr().out

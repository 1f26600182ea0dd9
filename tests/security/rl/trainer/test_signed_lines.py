"""The lines of a signed run: signed by its owner, and written by those that the run grants."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace

import pytest
import torch
from granted_groups import SECRET, UNCHECKED, made_up_group
from heartbeats import put_heartbeat
from rank_runs import train
from signed_run import OWNER, STRANGER, WORKER

from deltawire.cli.main import main
from deltawire.config import BuildConfig, parse_config
from deltawire.errors import InputError, SignatureError, UnreadableError
from deltawire.export.models import save_model
from deltawire.rl.control.challenges import nonce_of
from deltawire.rl.control.rollout_reader import read_group
from deltawire.rl.trainer.bootstrap import start_lines, start_run
from deltawire.rl.trainer.lines import LinesTrainer
from deltawire.rl.trainer.model import open_policy_model
from deltawire.rl.trainer.trainer import Trainer
from deltawire.runtime.lines import line_bucket, publication_bucket, run_of_line
from deltawire.runtime.process import Process, open_run
from deltawire.runtime.signed_bucket import grant_role
from deltawire.runtime.trusted import ReaderTrust, open_as_trainer, trusted
from deltawire.store import open_bucket
from deltawire.sync import read_history, read_run
from deltawire.train.build import build_model, byte_tokenizer
from deltawire.wire import keys, roles
from deltawire.wire.ledger import CommitMetadata
from deltawire.wire.objects import encode_json
from deltawire.wire.roles import Pin
from deltawire.wire.rollouts import encode_group
from deltawire.wire.status import Challenge

VERSIONS = 2
LINES = ("math", "words")


def config_of(folder, **train):
    return parse_config(
        {
            "name": "signed-lines",
            "model": {"path": str(folder / "model")},
            "train": {
                "versions": VERSIONS,
                "groups_per_step": 1,
                "max_staleness": 100,
                "optimizer": {"learning_rate": 1e-2},
                "schedule": {"warmup_steps": 1},
                **train,
            },
            "trust": UNCHECKED,
            "evaluate": {"every": 0},
        },
        source="test",
    )


class Signed:
    """A run as its owner, its worker, a reader and a stranger have it."""

    def __init__(self, folder, **train):
        sizes = BuildConfig(
            hidden_size=32, layers=1, head_size=16, feed_forward_size=48, context=64
        )
        save_model(build_model(sizes, seed=0), byte_tokenizer(), folder / "model")
        self.config, self.model = config_of(folder, **train), folder / "model"
        self.plain = open_bucket(str(folder / "bucket"), create=True)
        self.owner = open_as_trainer(self.plain, OWNER)
        self.pin = self.owner.pin

    def grant(self):
        key, run_id = WORKER.public_key, self.pin.run_id
        grant_role(self.plain, OWNER, run_id=run_id, role="worker-w0", public_key=key)

    def opened(self, *, pin=None, signer=None, role=""):
        return trusted(self.plain, ReaderTrust(pin or self.pin), signer=signer, role=role)

    def store(self, line, count):
        worker = self.opened(signer=WORKER, role="worker-w0")
        own, place = self.owner, worker
        if line:
            own, place = line_bucket(own, line), line_bucket(worker, line)
        own.put(keys.challenge("w0"), encode_json(Challenge(worker="w0", secret=SECRET)))
        for number in range(count):
            group = replace(made_up_group(number), nonce=nonce_of(SECRET, 0, number))
            place.create(keys.rollout("w0", number), encode_group(group))
        put_heartbeat(place, "w0", stored=count, at=time.time())

    def train_lines(self):
        torch.set_num_threads(1)
        process = Process(self.owner, "trainer", "trainer", supervised=False)
        with (
            process.registered(),
            LinesTrainer(process, self.config, signer=OWNER, changed=True) as trainer,
        ):
            trainer.loop()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    adapters = [{"name": name, "rank": 2, "targets": ["q_proj"]} for name in LINES]
    signed = Signed(tmp_path_factory.mktemp("lines"), adapters=adapters)
    start_lines(signed.owner, signed.config, signed.model, signer=OWNER, run_id=signed.pin.run_id)
    signed.grant()
    for name in LINES:
        signed.store(name, VERSIONS)
    signed.train_lines()
    return signed


def test_each_line_is_the_owners_and_its_id_follows_from_the_runs(run):
    for name in LINES:
        place = line_bucket(run.opened(), name)
        held, config = open_run(place)
        assert held.id == roles.run_of_line(run.pin.run_id, name)
        assert held.public_key == OWNER.public_key
        assert config.line.name == name
        assert [one.version for one in read_history(place, held)] == [1, 2]
        assert place.pin == Pin(OWNER.public_key, held.id)
        assert read_run(run_of_line(place, name)).id == run.pin.run_id


def test_a_line_is_not_trusted_while_its_pinned_run_is_hidden(run, tmp_path):
    """A store that withholds run.json, from a reader that knows the owner only."""
    shutil.copytree(run.plain.url.removeprefix("file://"), tmp_path / "bucket")
    plain = open_bucket(str(tmp_path / "bucket"))
    plain.delete(keys.RUN)
    reader = trusted(plain, ReaderTrust(Pin(OWNER.public_key, "")))
    with pytest.raises(SignatureError, match="no signed run"):
        line_bucket(reader, LINES[0])


def test_a_version_of_one_line_is_none_of_another(run):
    reader = run.opened()
    math, words = (line_bucket(reader, name) for name in LINES)
    other = words.get(keys.manifest(VERSIONS), limit=1 << 20)
    run.plain.put(f"{keys.line('math')}/{keys.manifest(VERSIONS + 1)}", other)
    try:
        held = read_run(math)
        with pytest.raises(UnreadableError, match="not made with the owner's key"):
            list(read_history(math, held))
        there = read_run(words)
        assert [one.version for one in read_history(words, there)] == [1, 2]
    finally:
        run.plain.delete(f"{keys.line('math')}/{keys.manifest(VERSIONS + 1)}")


def test_a_group_of_one_line_is_none_of_another(run):
    key = keys.rollout("w0", 0)
    data = run.plain.get(f"{keys.line('words')}/{key}", limit=1 << 20)
    moved = keys.rollout("w0", 7)
    run.plain.put(f"{keys.line('math')}/{moved}", data)
    run.plain.put(f"{keys.line('math')}/{keys.rollout('w0', 8)}", data)
    for number in (7, 8):
        with pytest.raises(SignatureError):
            read_group(line_bucket(run.opened(), "math"), "w0", number)


def test_only_a_key_that_the_run_grants_writes_to_a_line(run):
    stranger = line_bucket(run.opened(signer=STRANGER, role="worker-w0"), "math")
    with pytest.raises(InputError, match="not the key that is granted"):
        stranger.check_writer()
    worker = line_bucket(run.opened(signer=WORKER, role="worker-w0"), "math")
    worker.check_writer()
    group = encode_group(made_up_group(9))
    stranger.create(keys.rollout("w0", 9), group)
    with pytest.raises(SignatureError):
        read_group(line_bucket(run.opened(), "math"), "w0", 9)


def test_a_line_of_another_run_is_refused(run):
    other = Pin(OWNER.public_key, "ef" * 16)
    place = line_bucket(run.opened(pin=other), "math")
    with pytest.raises(SignatureError):
        read_run(place)


def test_further_precisions_of_a_signed_run_are_signed(tmp_path):
    signed = Signed(tmp_path, also_publish=["fp8-block-f32"])
    start_run(signed.owner, signed.config, signed.model, signer=OWNER, run_id=signed.pin.run_id)
    signed.grant()
    signed.store("", VERSIONS)
    torch.set_num_threads(1)
    process = Process(signed.owner, "trainer", "trainer", supervised=False)
    with process.registered():
        held, _ = open_run(signed.owner)
        model = open_policy_model(signed.owner, held, signed.config)
        Trainer(process, held, signed.config, model, signer=OWNER).loop()
    place = publication_bucket(signed.opened(), "fp8-block-f32")
    line = read_run(place, public_key=OWNER.public_key)
    assert line.id == roles.run_of_line(signed.pin.run_id, "fp8-block-f32")
    assert [one.version for one in read_history(place, line)] == [1, 2]


@pytest.mark.parametrize("words", [["status", "--json"], ["log", "--json"], ["fsck"]])
def test_commands_take_the_runs_pin_for_a_line(run, words, capsys):
    line = f"{run.plain.url}/{keys.line('math')}"
    assert main([words[0], line, *words[1:], "--public-key", str(run.pin)]) == 0
    capsys.readouterr()
    other = Pin(OWNER.public_key, "ef" * 16)
    assert main([words[0], line, *words[1:], "--public-key", str(other)]) != 0
    assert "another run" in capsys.readouterr().err


@pytest.mark.drills
def test_ranks_write_to_the_lines_of_a_signed_run(tmp_path):
    adapters = [{"name": name, "rank": 2, "targets": ["q_proj"]} for name in LINES]
    signed = Signed(tmp_path, adapters=adapters, ranks=2)
    start_lines(signed.owner, signed.config, signed.model, signer=OWNER, run_id=signed.pin.run_id)
    signed.grant()
    for name in LINES:
        signed.store(name, VERSIONS)
    OWNER.write(tmp_path / "owner.key")
    train(signed.plain, "--key", str(tmp_path / "owner.key"))
    for name in LINES:
        place = line_bucket(signed.opened(), name)
        history = list(read_history(place, read_run(place)))
        assert [one.version for one in history] == [1, 2]
        made = [CommitMetadata.of(one.metadata, run="", version=one.version) for one in history]
        assert {one.ranks for one in made} == {2}

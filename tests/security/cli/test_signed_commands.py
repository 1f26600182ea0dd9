"""Commands on a signed run: keys by file, grants, pins, and one clear error for everything else."""

import argparse
import json
import stat

import pytest
from signed_run import OWNER, STRANGER, SignedRun

from deltawire.cli import COMMANDS
from deltawire.cli.main import build_parser, main
from deltawire.errors import InputError, SignatureError
from deltawire.launch.processes import ChildOptions, open_process, run_as_trainer
from deltawire.launch.role_keys import RunKeys, owned_run, refuse_signed
from deltawire.runtime.signed_bucket import SignedBucket
from deltawire.runtime.trusted import ReaderTrust
from deltawire.store import open_bucket
from deltawire.wire import keys
from deltawire.wire.objects import encode_json
from deltawire.wire.roles import Pin
from deltawire.wire.signing import Ed25519Signer
from deltawire.wire.status import TrainerStatus

PINNED = ("status", "log", "fsck", "pull", "report", "probes", "metrics", "replay")
LOCAL = {
    *("midtrain", "run", "tinker", "publish", "keygen", "grant", "import", "bench", "shapes"),
    *("init", "doctor", "pack", "completion", "simulate"),
}
"""Commands that read no run, or read only one that they own by ``--key``."""


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # Processes set it for good.
    return SignedRun(tmp_path / "bucket", versions=2)


@pytest.fixture
def owner(tmp_path):
    path = tmp_path / "owner.key"
    OWNER.write(path)
    return path


def call(*arguments):
    return main([str(argument) for argument in arguments])


def actions_of(parser):
    """The commands of a parser by name; none if it has none."""
    found = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
    return found[0].choices if found else {}


def leaves(parser):
    """The parsers below one that have no further commands."""
    below = actions_of(parser).values()
    return [leaf for each in below for leaf in leaves(each)] if below else [parser]


def test_every_command_that_reads_a_run_takes_a_pin():
    commands = actions_of(build_parser())
    assert len(commands) == len(COMMANDS)
    parsers = [(name, each) for name, parser in commands.items() for each in leaves(parser)]
    for name, parser in parsers:
        flags = {option for action in parser._actions for option in action.option_strings}
        trust = {"--public-key", "--max-age", "--allow-rollback"} & flags
        assert len(trust) == 3 or name in LOCAL, name


@pytest.mark.parametrize("command", PINNED)
def test_a_pinned_command_refuses_a_foreign_run(command, run, tmp_path, capsys):
    place = [tmp_path / "model"] if command == "pull" else []
    for pin in (STRANGER.public_key, f"{OWNER.public_key}:{'cd' * 16}"):
        assert call(command, run.plain.url, *place, "--public-key", pin) == 3
        error = capsys.readouterr().err
        assert "the run is signed by another key" in error or "the run has the id" in error
        assert error.count("error:") == 1
    assert call(command, run.plain.url, *place, "--public-key", "x") == 2
    assert "'x' is not a public key" in capsys.readouterr().err


def test_pinned_commands_read_the_owners_run(run, tmp_path, capsys):
    pin = str(run.pin)
    run.bucket("trainer").put(
        keys.TRAINER,
        encode_json(
            TrainerStatus(phase="training", version=1, digest="", epoch=1, credits={}, at=0.0)
        ),
    )
    assert call("log", run.plain.url, "--public-key", pin, "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["versions"]) == 2
    assert call("status", run.plain.url, "--public-key", pin, "--json") == 0
    assert json.loads(capsys.readouterr().out)["version"] == 1
    assert call("fsck", run.plain.url, "--public-key", pin) == 0
    run.plain.delete(keys.manifest(1))
    assert call("log", run.plain.url, "--public-key", pin) == 3
    assert "--allow-rollback" in capsys.readouterr().err
    assert call("log", run.plain.url, "--public-key", pin, "--allow-rollback") == 0
    assert call("log", run.plain.url, "--public-key", pin, "--max-age", "0") == 3
    assert "at most 0 s are allowed" in capsys.readouterr().err
    assert call("log", run.plain.url, "--max-age", "60") == 2


def test_status_names_what_was_forged(run, capsys):
    run.plain.put(keys.TRAINER, b'{"format":1,"phase":"finished"}\n')
    run.plain.put(keys.heartbeat("w7"), b"{}\n")
    assert call("status", run.plain.url, "--json") == 0
    problems = "\n".join(json.loads(capsys.readouterr().out)["problems"])
    assert "trainer.json" in problems
    assert "heartbeats/w7.json" in problems


def test_a_worker_gets_its_key_by_a_grant(run, owner, tmp_path, capsys):
    file = tmp_path / "w2.key"
    assert call("keygen", file) == 0
    public = capsys.readouterr().out.strip()
    options = ChildOptions(key=str(file), trust=ReaderTrust(run.pin))
    with pytest.raises(InputError, match="no key is granted to the role 'worker-w2'"):
        open_process(run.plain.url, "w2", "worker", options)
    assert call("grant", run.plain.url, "worker-w2", public, "--key", owner) == 0
    assert str(run.pin) in capsys.readouterr().out
    process = open_process(run.plain.url, "w2", "worker", options)
    process.bucket.put(keys.heartbeat("w2"), b"{}")
    assert call("grant", run.plain.url, "worker-w3", STRANGER.public_key, "--key", owner) == 0
    with pytest.raises(InputError, match="not the key that is granted to the worker-w3"):
        open_process(run.plain.url, "w3", "worker", options)


def test_commands_without_a_grant_end_with_one_error(run, owner, tmp_path, capsys):
    assert call("worker", run.plain.url, "--id", "w9") == 2
    assert "the run is signed, and the worker-w9 has no key" in capsys.readouterr().err
    assert call("evaluator", run.plain.url) == 2
    assert call("trainer", run.plain.url) == 2
    stranger = tmp_path / "stranger.key"
    STRANGER.write(stranger)
    assert call("trainer", run.plain.url, "--key", stranger) == 3
    assert "signed by another key" in capsys.readouterr().err
    for role in ("owner", "worker-", "worker-../x", "Trainer", "worker-a b"):
        assert call("grant", run.plain.url, role, STRANGER.public_key, "--key", owner) == 2
    assert call("grant", run.plain.url, "worker-w1", STRANGER.public_key, "--key", stranger) == 3


def test_a_job_makes_and_grants_a_key_for_each_of_its_processes(tmp_path, owner):
    bucket = open_bucket(str(tmp_path / "new"), create=True)
    job = RunKeys(bucket, owner, tmp_path / "keys")
    assert job.pin.public_key == OWNER.public_key
    arguments = job.arguments("worker-w0")
    assert arguments == job.arguments("worker-w0")
    file = tmp_path / "keys" / "worker-w0.key"
    assert arguments == ["--public-key", str(job.pin), "--key", str(file)]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    secret = file.read_text().strip()
    assert secret not in " ".join(arguments)
    signer = Ed25519Signer.read(file)
    # Granted before the run is there: a process may start before the trainer has created it.
    SignedBucket(bucket, pin=job.pin, signer=signer, role="worker-w0").check_writer()
    assert job.arguments("trainer")[-1] == str(owner)


def test_a_signed_run_is_not_continued_without_its_key(run):
    with pytest.raises(InputError, match="the run is signed, and no key was given"):
        refuse_signed(run.plain, None)
    refuse_signed(open_bucket("memory://"), None)


def test_the_owner_of_a_run_is_its_keys(run, tmp_path):
    assert owned_run(run.plain, OWNER) == run.pin
    with pytest.raises(SignatureError, match="signed by another key"):
        owned_run(run.plain, STRANGER)
    with pytest.raises(InputError, match="different keys"):
        owned_run(run.plain, OWNER, Pin(STRANGER.public_key))
    with pytest.raises(SignatureError, match="has the id"):
        owned_run(run.plain, OWNER, Pin(OWNER.public_key, "cd" * 16))
    fresh = open_bucket("memory://")
    assert owned_run(fresh, OWNER).run_id != owned_run(fresh, OWNER).run_id


def test_a_trainer_with_a_key_does_not_continue_an_unsigned_run(tmp_path, owner):
    bucket = SignedRun(tmp_path / "b").plain
    bucket.delete(keys.RUN)
    from deltawire.testing.tiny import start_run

    start_run(bucket)
    with pytest.raises(SignatureError, match="the run is not signed"):
        run_as_trainer(bucket.url, source=None, options=ChildOptions(key=str(owner)))

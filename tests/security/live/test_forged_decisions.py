"""In a signed run, only the gateways' key decides which version serves."""

import pytest
from signed_run import OTHER, STRANGER, WORKER, SignedRun

from deltawire.errors import InputError
from deltawire.rl.trainer import rollbacks
from deltawire.rl.trainer.rollbacks import RollbackWatch
from deltawire.runtime.decision_log import DecisionLog
from deltawire.sync import read_manifest
from deltawire.wire import keys
from deltawire.wire.decisions import Decision, ServedVersion
from deltawire.wire.objects import encode_json
from deltawire.wire.roles import GATEWAY_ROLE


@pytest.fixture
def run():
    run = SignedRun(versions=3)
    run.grant(GATEWAY_ROLE, OTHER)
    return run


def served(run, version):
    return ServedVersion(version, read_manifest(run.plain, run.run, version).digest)


def decision(run, number, verdict, serving, candidate=None):
    return Decision(
        number=number, run=run.run.id, verdict=verdict, serving=served(run, serving),
        candidate=None if candidate is None else served(run, candidate), at=1.0, by="ann",
    )  # fmt: skip


def begun(run):
    """The gateways let version 2 serve; returns the log as any reader has it."""
    gateway = DecisionLog(run.bucket(GATEWAY_ROLE, signer=OTHER), run.run.id)
    assert gateway.append(decision(run, 0, "serve", 2))
    log = DecisionLog(run.bucket(), run.run.id)
    assert log.poll() == 1
    return log


def forge_unsigned(run, key, data):
    run.plain.create(key, data)


def forge_by_a_stranger(run, key, data):
    run.bucket(GATEWAY_ROLE, signer=STRANGER).create(key, data)


def forge_as_another_role(run, key, data):
    with pytest.raises(InputError):  # Its own bucket refuses to sign it.
        run.bucket("worker-w0", signer=WORKER).create(key, data)
    run.plain.create(key, data)


def forge_by_a_copy(run, key, data):
    """A decision that the gateways signed for another number."""
    del data
    run.plain.create(key, run.plain.get(keys.live_decision(0), limit=1 << 20))


@pytest.mark.parametrize(
    "forge", [forge_unsigned, forge_by_a_stranger, forge_as_another_role, forge_by_a_copy]
)
def test_a_forged_decision_is_void_and_stops_nothing(run, forge, monkeypatch):
    monkeypatch.setattr(rollbacks, "POLL_EVERY_S", 0.0)
    log = begun(run)
    watch = RollbackWatch(run.bucket(), run.run, checkpoints=2)
    rollback = decision(run, 1, "rollback", 0, 2)
    forge(run, keys.live_decision(1), encode_json(rollback))
    assert watch.poll(version=2) is None, "a trainer does not follow it"
    assert log.poll() == 0
    assert log.newest.serving.version == 2
    assert list(log.void) == [1]
    gateway = DecisionLog(run.bucket(GATEWAY_ROLE, signer=OTHER), run.run.id)
    gateway.poll()
    assert gateway.append(decision(run, 2, "rollback", 0, 2))
    assert log.poll() == 1
    assert watch.poll(version=2) == log.newest

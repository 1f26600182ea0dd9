"""Objects that gateways signed with an earlier key stay valid; it signs nothing new."""

import time

import pytest
from signed_run import OTHER, OWNER, STRANGER, WORKER, SignedRun

from deltawire.cli.main import main
from deltawire.errors import DeltawireError, SignatureError
from deltawire.runtime import signed_bucket
from deltawire.runtime.decision_log import DecisionLog
from deltawire.runtime.grant_log import log_grant, read_grants
from deltawire.sync import read_manifest
from deltawire.testing.faulty import FaultyBucket, disk_full
from deltawire.wire import keys
from deltawire.wire.decisions import Decision, ServedVersion
from deltawire.wire.roles import GATEWAY_ROLE, RoleGrant, Trust, encode_grant, sign_bytes
from deltawire.wire.signing import verify

OLD, NEW = OTHER, WORKER
CAPTURE = keys.live_captures("g0", 0)


@pytest.fixture(autouse=True)
def _grants_are_read_again_at_once(monkeypatch):
    monkeypatch.setattr(signed_bucket, "REREAD_S", -1.0)


@pytest.fixture
def run():
    run = SignedRun(versions=3)
    run.grant(GATEWAY_ROLE, OLD)
    return run


def trust_of(run):
    return Trust(run.run.id, OWNER.public_key, {}, verify)


def decision(run, number, verdict, serving, candidate=None):
    def served(version):
        return ServedVersion(version, read_manifest(run.plain, run.run, version).digest)

    return Decision(
        number=number, run=run.run.id, verdict=verdict, serving=served(serving),
        candidate=None if candidate is None else served(candidate), at=1.0, by="ann",
    )  # fmt: skip


def gateway(run, signer):
    log = DecisionLog(run.bucket(GATEWAY_ROLE, signer=signer), run.run.id)
    log.poll()
    return log


def rolled_back(run, signer=OLD):
    """Version 2 served and was rolled back, and an answer was stored."""
    log = gateway(run, signer)
    assert log.append(decision(run, 0, "serve", 2))
    assert log.append(decision(run, 1, "rollback", 0, 2))
    run.bucket(GATEWAY_ROLE, signer=signer).create(CAPTURE, b"an answer")


def reader(run):
    log = DecisionLog(run.bucket(), run.run.id)
    log.poll()
    return log


def test_a_new_key_of_the_gateways_voids_nothing(run):
    rolled_back(run)
    run.grant(GATEWAY_ROLE, NEW)
    log = reader(run)
    assert (log.void, log.rejected()) == ({}, {2})
    assert run.bucket().get(CAPTURE, limit=100) == b"an answer"
    assert gateway(run, NEW).append(decision(run, 2, "promote", 1)), "the series goes on"
    assert len(reader(run).decisions) == 3


def test_an_earlier_key_decides_nothing_more(run):
    rolled_back(run)
    run.grant(GATEWAY_ROLE, NEW)
    key = keys.live_decision(2)
    from deltawire.wire.objects import encode_json

    forged = encode_json(decision(run, 2, "promote", 2))
    data = sign_bytes(
        forged, run_id=run.run.id, key=key, signer=OLD, role=GATEWAY_ROLE, now=time.time() - 3600
    )
    run.plain.create(key, data)
    log = reader(run)
    assert list(log.void) == [2]
    assert log.newest.verdict == "rollback"


def test_an_earlier_key_signs_no_later_answers(run):
    run.grant(GATEWAY_ROLE, NEW)
    data = sign_bytes(
        b"x", run_id=run.run.id, key=CAPTURE, signer=OLD, role=GATEWAY_ROLE, now=time.time() + 1
    )
    run.plain.create(CAPTURE, data)
    with pytest.raises(SignatureError):
        run.bucket().get(CAPTURE, limit=100)


def test_a_stolen_key_is_revoked_with_all_that_it_signed(run):
    rolled_back(run)
    run.grant(GATEWAY_ROLE, NEW, revoke=True)
    assert reader(run).decisions == []
    with pytest.raises(SignatureError):
        run.bucket().get(CAPTURE, limit=100)
    run.grant(GATEWAY_ROLE, STRANGER)
    assert reader(run).decisions == [], "a later grant does not bring it back"


def test_other_roles_and_replaced_objects_need_the_key_of_now(run):
    run.bucket("worker-w0").create(keys.rollout("w0", 0), b"a group")
    run.bucket(GATEWAY_ROLE, signer=OLD).put(keys.live_gateway("g0"), b"status")
    run.grant("worker-w0", STRANGER)
    run.grant(GATEWAY_ROLE, NEW)
    for key in (keys.rollout("w0", 0), keys.live_gateway("g0")):
        with pytest.raises(SignatureError):
            run.bucket().get(key, limit=100)


@pytest.mark.parametrize("damage", ["first deleted", "all deleted", "exchanged"])
def test_a_log_that_was_changed_makes_no_key_valid(run, damage):
    rolled_back(run)
    run.grant(GATEWAY_ROLE, NEW)
    first, second = keys.grant(GATEWAY_ROLE, 0), keys.grant(GATEWAY_ROLE, 1)
    run.plain.delete([first])
    if damage == "all deleted":
        run.plain.delete([second])
    if damage == "exchanged":
        forged = RoleGrant(run=run.run.id, role=GATEWAY_ROLE, public_key=STRANGER.public_key)
        run.plain.create(first, encode_grant(forged, signer=STRANGER, key=first))
    assert reader(run).decisions == []


def test_a_grant_that_was_interrupted_is_finished_by_the_next(run):
    rolled_back(run)
    faulty = FaultyBucket(run.plain)
    faulty.fail("put", keys.role(GATEWAY_ROLE), error=disk_full)
    with pytest.raises(DeltawireError):
        run.grant(GATEWAY_ROLE, NEW, bucket=faulty)
    assert reader(run).rejected() == {2}, "the earlier key signs on"
    run.grant(GATEWAY_ROLE, NEW)
    assert reader(run).rejected() == {2}
    logged = read_grants(run.plain, GATEWAY_ROLE, trust=trust_of(run))
    assert [one.public_key for one in logged] == [OLD.public_key, NEW.public_key]


def test_a_key_that_was_granted_before_there_was_a_log_enters_it(run):
    rolled_back(run)
    run.plain.delete([keys.grant(GATEWAY_ROLE, 0)])
    run.grant(GATEWAY_ROLE, NEW)
    assert reader(run).rejected() == {2}


def test_two_that_log_at_once_leave_both(run):
    def grant(signer):
        return RoleGrant(
            run=run.run.id, role=GATEWAY_ROLE, public_key=signer.public_key, granted_at=time.time()
        )

    faulty = FaultyBucket(run.plain)
    other = grant(NEW)
    faulty.pause(
        "create",
        keys.grant(GATEWAY_ROLE, 1),
        wait=lambda: log_grant(run.plain, other, None, signer=OWNER, trust=trust_of(run)),
    )
    log_grant(faulty, grant(STRANGER), None, signer=OWNER, trust=trust_of(run))
    logged = read_grants(run.plain, GATEWAY_ROLE, trust=trust_of(run))
    assert [one.public_key for one in logged] == [one.public_key for one in (OLD, NEW, STRANGER)]


def test_the_command_revokes(tmp_path, capsys):
    run = SignedRun(tmp_path / "run")
    run.grant(GATEWAY_ROLE, OLD)
    rolled_back_run = run.bucket(GATEWAY_ROLE, signer=OLD)
    rolled_back_run.create(CAPTURE, b"an answer")
    owner = tmp_path / "owner.key"
    OWNER.write(owner)
    command = ["grant", str(tmp_path / "run"), GATEWAY_ROLE, NEW.public_key, "--key", str(owner)]
    assert main([*command, "--revoke", "--json"]) == 0
    assert NEW.public_key not in capsys.readouterr().err
    with pytest.raises(SignatureError):
        run.bucket().get(CAPTURE, limit=100)

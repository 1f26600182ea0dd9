"""Objects of the loop are signed by the key of their role, for one place, run and time."""

import msgspec
import pytest

from deltawire.errors import CorruptError, InputError, SignatureError
from deltawire.testing.faulty import flip_bit
from deltawire.wire import keys
from deltawire.wire.roles import (
    CLOCKS_DIFFER_S,
    MAX_SIGNATURE_BYTES,
    TRAINER_ROLE,
    Pin,
    RoleGrant,
    Trust,
    decode_grant,
    encode_grant,
    open_bytes,
    role_for,
    sign_bytes,
    worker_role,
)
from deltawire.wire.signing import Ed25519Signer, verify

OWNER, TRAINER, WORKER, OTHER = (Ed25519Signer(bytes([i]) * 32) for i in range(1, 5))
RUN_ID = "ab" * 16
W1 = worker_role("w1")
TRUST = Trust(
    RUN_ID,
    OWNER.public_key,
    {TRAINER_ROLE: TRAINER.public_key, W1: WORKER.public_key},
    verify,
    run="s3://b",
)
GROUP = bytes(range(256)) + b"\n}\n"
KEY = keys.rollout("w1", 7)


def group(**changes):
    options = {"run_id": RUN_ID, "key": KEY, "signer": WORKER, "role": W1}
    return sign_bytes(GROUP, now=1000.0, **{**options, **changes})


def content(data, *, trust=TRUST, key=KEY, role=W1, **options):
    return open_bytes(data, trust=trust, key=key, role=role, **options).data


def test_what_is_signed_comes_back():
    assert content(group()) == GROUP
    assert content(sign_bytes(b"", run_id=RUN_ID, key=KEY, signer=WORKER, role=W1)) == b""
    assert open_bytes(group(), trust=TRUST, key=KEY, role=W1).signed_at == 1000.0
    long = sign_bytes(GROUP, run_id=RUN_ID, key=KEY, signer=WORKER, role=worker_role("w" * 63))
    assert len(long) - len(GROUP) <= MAX_SIGNATURE_BYTES


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"signer": OTHER}, "not made with the"),
        ({"signer": OWNER}, "not made with the"),
        ({"role": "owner"}, "role 'owner'"),
        ({"role": worker_role("w2")}, "role 'worker-w2'"),
        ({"key": keys.rollout("w1", 8)}, "not made with the"),
        ({"run_id": "cd" * 16}, "another run"),
    ],
)
def test_each_claim_of_a_signature_broken_in_turn(changes, reason):
    with pytest.raises(SignatureError, match=reason):
        content(group(**changes))


def test_a_key_of_one_role_signs_nothing_of_another():
    """Not even where it is granted both: the role is part of what is signed."""
    data = group(signer=TRAINER, role=TRAINER_ROLE)
    with pytest.raises(SignatureError, match="signed in the role 'trainer', not as 'worker-w1'"):
        content(data)
    with pytest.raises(SignatureError, match="no key is granted to the role 'worker-w9'"):
        content(group(role=worker_role("w9")), role=worker_role("w9"))


def test_every_flipped_bit_of_a_group_is_noticed():
    data = group()
    for bit in range(8 * len(data)):
        with pytest.raises(SignatureError):
            content(flip_bit(data, bit))
    for size in range(len(data)):
        with pytest.raises(SignatureError):
            content(data[:size])


def test_a_plain_object_is_refused():
    for data in (b"", b"\n", GROUP, GROUP + b"\n", b"{}\n" * 9):
        with pytest.raises(SignatureError, match="not signed, but the run is"):
            content(data)


def test_an_object_that_is_not_fresh_is_refused():
    content(group(), max_age_s=60.0, now=1059.0)
    content(group(), max_age_s=60.0, now=1000.0 - CLOCKS_DIFFER_S)
    for now in (1061.0, 999.0 - CLOCKS_DIFFER_S):
        with pytest.raises(SignatureError, match="was signed"):
            content(group(), max_age_s=60.0, now=now)
    with pytest.raises(SignatureError, match="in the future"):
        content(group(), now=999.0 - CLOCKS_DIFFER_S)


@pytest.mark.parametrize(
    ("key", "role"),
    [
        (keys.TRAINER, "trainer"),
        (keys.PROBES, "trainer"),
        (keys.RETAINED, "trainer"),
        (keys.tombstone("w1"), "trainer"),
        (keys.challenge("w1"), "trainer"),
        (keys.checkpoint_commit(3), "trainer"),
        (keys.heartbeat("trainer"), "trainer"),
        (keys.heartbeat("evaluator"), "evaluator"),
        (keys.heartbeat("warm-start"), "warm-start"),
        (keys.heartbeat("w1"), "worker-w1"),
        (keys.lease("w1", 4), "worker-w1"),
        (keys.rollout("w1", 4), "worker-w1"),
        (keys.RUN, None),
        (keys.manifest(3), None),
        (keys.role("trainer"), None),
        (keys.checkpoint_part(3, 0), None),
        (keys.events("w1-00", 0), "worker-w1"),
        (keys.events("w1-b-00", 0), "worker-w1-b"),
        (keys.events("trainer-00", 0), "trainer"),
        (keys.events("supervisor-00", 0), "supervisor"),
        (keys.events("strange", 0), "worker-strange"),
        (keys.events("CON-00", 0), "worker-CON-00"),  # No process may have the name CON.
        (keys.archive(0), "trainer"),
        (keys.STATUS, None),
    ],
)
def test_each_key_has_one_role(key, role):
    assert role_for(key) == role
    if role is not None:
        assert keys.role(role).startswith(keys.ROLES)


def test_grants_are_the_owners():
    grant = RoleGrant(run=RUN_ID, role=W1, public_key=WORKER.public_key)
    assert decode_grant(encode_grant(grant, signer=OWNER), W1, trust=TRUST) == grant
    with pytest.raises(CorruptError, match="not made with the owner's key"):
        decode_grant(encode_grant(grant, signer=WORKER), W1, trust=TRUST)
    with pytest.raises(CorruptError):
        decode_grant(encode_grant(grant, signer=OWNER), worker_role("w2"), trust=TRUST)
    other = msgspec.structs.replace(grant, run="cd" * 16)
    with pytest.raises(CorruptError, match="another run or role"):
        decode_grant(encode_grant(other, signer=OWNER), W1, trust=TRUST)


def test_a_pinned_run_is_that_run():
    for text in (OWNER.public_key, f"{OWNER.public_key}:{RUN_ID}"):
        Pin.parse(text).check(OWNER.public_key, RUN_ID, run="s3://b")
        assert str(Pin.parse(text)) == text
    for text, reason in (
        (OTHER.public_key, "signed by another key"),
        (f"{OWNER.public_key}:{'cd' * 16}", "has the id"),
    ):
        with pytest.raises(CorruptError, match=reason):
            Pin.parse(text).check(OWNER.public_key, RUN_ID, run="s3://b")
    for text in ("", "x", OWNER.public_key[:-1], f"{OWNER.public_key}:", f"{OWNER.public_key}\n"):
        with pytest.raises(InputError):
            Pin.parse(text)

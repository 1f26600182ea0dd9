"""Objects of the loop are signed by the key of their role, for one place, run and time."""

import msgspec
import pytest

from deltawire.errors import CorruptError, InputError
from deltawire.testing.faulty import flip_bit
from deltawire.wire import keys
from deltawire.wire.roles import (
    CLOCKS_DIFFER_S,
    TRAINER_ROLE,
    Pin,
    RoleGrant,
    Trust,
    decode_grant,
    encode_grant,
    open_bytes,
    open_json,
    sign_bytes,
    sign_json,
    worker_role,
)
from deltawire.wire.run import Run
from deltawire.wire.signing import Ed25519Signer, verify
from deltawire.wire.status import TrainerStatus

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
STATUS = TrainerStatus(
    phase="training", version=4, digest="0" * 32, epoch=1, credits={"w1": 3}, at=5.0
)
GROUP = bytes(range(256)) + b"\n}\n"
KEY = keys.rollout("w1", 7)


def status(**changes):
    options = {"run_id": RUN_ID, "key": keys.TRAINER, "signer": TRAINER, "role": TRAINER_ROLE}
    return sign_json(STATUS, now=1000.0, **{**options, **changes})


def opened(data, *, trust=TRUST, key=keys.TRAINER, role=TRAINER_ROLE, **options):
    return open_json(data, TrainerStatus, trust=trust, key=key, role=role, **options)


def group(**changes):
    options = {"run_id": RUN_ID, "key": KEY, "signer": WORKER, "role": W1}
    return sign_bytes(GROUP, now=1000.0, **{**options, **changes})


def content(data, *, trust=TRUST, key=KEY, role=W1, **options):
    return open_bytes(data, trust=trust, key=key, role=role, **options)


def test_what_is_signed_comes_back():
    assert opened(status()) == STATUS
    assert content(group()) == GROUP
    assert content(sign_bytes(b"", run_id=RUN_ID, key=KEY, signer=WORKER, role=W1)) == b""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"signer": OTHER}, "not that of the"),
        ({"signer": OWNER}, "not that of the"),
        ({"role": "owner"}, "role 'owner'"),
        ({"role": worker_role("w2")}, "role 'worker-w2'"),
        ({"key": keys.rollout("w1", 8)}, "not that of the"),
        ({"run_id": "cd" * 16}, "another run"),
    ],
)
def test_each_claim_of_a_signature_broken_in_turn(changes, reason):
    with pytest.raises(CorruptError, match=reason):
        opened(status(**changes))
    with pytest.raises(CorruptError, match=reason):
        content(group(**changes))


def test_a_key_of_one_role_signs_nothing_of_another():
    """Not even where it is granted both: the role is part of what is signed."""
    data = status()
    with pytest.raises(CorruptError, match="signed in the role 'trainer', not as 'worker-w1'"):
        opened(data, role=W1)
    with pytest.raises(CorruptError, match="no key is granted to the role 'worker-w9'"):
        content(group(role=worker_role("w9")), role=worker_role("w9"))


def test_every_flipped_bit_of_a_group_is_noticed():
    data = group()
    for bit in range(8 * len(data)):
        with pytest.raises(CorruptError):
            content(flip_bit(data, bit))
    for size in range(len(data)):
        with pytest.raises(CorruptError):
            content(data[:size])


def test_a_plain_object_is_refused_in_a_signed_run_and_read_in_another():
    plain, unsigned = msgspec.json.encode(STATUS), Trust(RUN_ID, "")
    assert opened(plain, trust=unsigned) == STATUS
    assert content(GROUP, trust=unsigned) == GROUP
    with pytest.raises(CorruptError):
        opened(plain)
    with pytest.raises(CorruptError):
        content(GROUP)


def test_an_object_that_is_not_fresh_is_refused():
    for check, data in ((opened, status()), (content, group())):
        check(data, max_age_s=60.0, now=1059.0)
        check(data, max_age_s=60.0, now=1000.0 - CLOCKS_DIFFER_S)
        for now in (1061.0, 999.0 - CLOCKS_DIFFER_S):
            with pytest.raises(CorruptError, match="was signed"):
                check(data, max_age_s=60.0, now=now)


def test_grants_are_the_owners():
    grant = RoleGrant(run=RUN_ID, role=W1, public_key=WORKER.public_key)
    assert decode_grant(encode_grant(grant, signer=OWNER), W1, trust=TRUST) == grant
    with pytest.raises(CorruptError, match="not that of the owner's key"):
        decode_grant(encode_grant(grant, signer=WORKER), W1, trust=TRUST)
    with pytest.raises(CorruptError):
        decode_grant(encode_grant(grant, signer=OWNER), worker_role("w2"), trust=TRUST)
    other = msgspec.structs.replace(grant, run="cd" * 16)
    with pytest.raises(CorruptError, match="another run or role"):
        decode_grant(encode_grant(other, signer=OWNER), W1, trust=TRUST)


def test_a_pinned_run_is_that_run():
    run = Run(
        id=RUN_ID, name="r", created_at=0.0, tensors=[], digest="0" * 32,
        public_key=OWNER.public_key,
    )  # fmt: skip
    for text in (OWNER.public_key, f"{OWNER.public_key}:{RUN_ID}"):
        Pin.parse(text).check(run, run="s3://b")
    for text, reason in (
        (OTHER.public_key, "signed by another key"),
        (f"{OWNER.public_key}:{'cd' * 16}", "has the id"),
    ):
        with pytest.raises(CorruptError, match=reason):
            Pin.parse(text).check(run, run="s3://b")
    for text in ("", "x", OWNER.public_key[:-1], f"{OWNER.public_key}:", f"{OWNER.public_key}\n"):
        with pytest.raises(InputError):
            Pin.parse(text)

"""Ed25519 keys that prove nothing, and signatures in a second form."""

import pytest
from test_readers_agree import RUN, answers, sealed

from deltawire.testing import reader as plain
from deltawire.wire import keys, run
from deltawire.wire.signing import Ed25519Signer, verify

P = 2**255 - 19
ORDER = 2**252 + 27742317777372353535851937790883648493
D = -121665 * pow(121666, -1, P) % P


def x_of(y):
    """The even x of a point of the curve -x² + y² = 1 + dx²y² (RFC 8032, 5.1.3), None without."""
    square = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
    root = pow(square, (P + 3) // 8, P)
    if root * root % P != square:
        root = root * pow(2, (P - 1) // 4, P) % P
    return root if root * root % P == square else None


def add(one, other):
    (x1, y1), (x2, y2) = one, other
    both = D * x1 * x2 * y1 * y2 % P
    x3 = (x1 * y2 + x2 * y1) * pow(1 + both, -1, P) % P
    return x3, (y1 * y2 + x1 * x2) * pow(1 - both, -1, P) % P


def times_eight(point):
    for _ in range(3):
        point = add(point, point)
    return point


def encoded(y, sign=0):
    return (y | sign << 255).to_bytes(32, "little").hex()


def test_the_list_has_all_points_of_small_order():
    assert run._SMALL_ORDER == plain.SMALL_ORDER
    points = {(x, y) for y in run._SMALL_ORDER for x in (x_of(y), -x_of(y) % P)}
    assert len(points) == 8
    assert {times_eight(point) for point in points} == {(0, 1)}
    other = next(y for y in range(2, 100) if x_of(y) is not None)
    assert times_eight((x_of(other), other)) != (0, 1)


@pytest.mark.parametrize("sign", [0, 1])
def test_weak_keys_are_refused(sign):
    weak = [*run._SMALL_ORDER, P, P + 1, P + 18]
    for y in weak:
        members = RUN | {"public_key": encoded(y, sign)}
        assert answers(keys.RUN, sealed(members)) == (False, False), y
    other = next(y for y in range(2, 100) if x_of(y) is not None)
    assert not run.key_fault(encoded(other, sign))


def test_a_sound_key_is_accepted():
    signer = Ed25519Signer(b"a sound key, 32 bytes for a test")
    members = RUN | {"public_key": signer.public_key}
    assert not run.key_fault(members["public_key"])
    run.decode_run(sealed(members), run="r", key=keys.RUN)


def test_other_forms_of_a_signature_are_refused():
    signer = Ed25519Signer(b"a sound key, 32 bytes for a test")
    signature = signer.sign(b"message")
    assert verify(signer.public_key, signature, b"message")
    s = int.from_bytes(signature[32:], "little")
    for other in (s + ORDER, s + 8 * ORDER - 1):
        if other < 1 << 256:
            forged = signature[:32] + other.to_bytes(32, "little")
            assert not verify(signer.public_key, forged, b"message")
    r = int.from_bytes(signature[:32], "little")
    flipped = (r ^ 1 << 255).to_bytes(32, "little") + signature[32:]
    assert not verify(signer.public_key, flipped, b"message")

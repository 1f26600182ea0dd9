"""Receipts, segments of captures and feedback, and assignments to arms."""

import base64

import msgspec
import numpy as np
import pytest

from deltawire.errors import CorruptError
from deltawire.wire.captures import (
    Capture,
    Feedback,
    decode_segment,
    encode_row,
    encode_segment,
)
from deltawire.wire.decisions import Decision, ServedVersion, assign
from deltawire.wire.receipts import (
    DOMAIN,
    Receipt,
    ReceiptKeys,
    hash_tokens,
    read_receipt,
    seal_receipt,
    spans_of,
)
from deltawire.wire.signing import Ed25519Signer

RUN = "0" * 32
SIGNER = Ed25519Signer(bytes(range(32)))
NAME, KEY = "e" * 32, bytes(range(32))
KEYS = ReceiptKeys({NAME: KEY})


def receipt(**changes):
    facts = {
        "run": RUN, "answer": "1" * 32, "conversation": "2" * 32, "turn": 3, "user": "a" * 32,
        "arm": "serving", "propensity": 1.0, "spans": [(7, 10)], "tokens": "b" * 32,
        "recorded": True, "at": 1e9,
    }  # fmt: skip
    return Receipt(**facts | changes)


def capture(**changes):
    facts = {
        "answer": "1" * 32, "conversation": "2" * 32, "turn": 0, "arm": "serving",
        "propensity": 1.0, "at": 1e9, "receipt": "r",
        "prompt": np.arange(3, dtype="<i4").tobytes(),
        "tokens": np.arange(2, dtype="<i4").tobytes(),
        "logprobs": np.full(2, -1.0, "<f4").tobytes(), "spans": [(7, 1), (8, 1)],
    }  # fmt: skip
    return Capture(**facts | changes)


def test_a_receipt_is_read_back_by_its_key_and_run_only():
    text = seal_receipt(receipt(), NAME, KEY)
    assert read_receipt(text, keys=KEYS, run=RUN) == receipt()
    assert read_receipt(text, keys=KEYS, run="f" * 32) is None
    assert read_receipt(text, keys=ReceiptKeys({NAME: bytes(32)}), run=RUN) is None
    assert read_receipt(text, keys=ReceiptKeys({"f" * 32: KEY}), run=RUN) is None


def test_a_receipt_shows_its_holder_neither_arm_nor_version():
    texts = [
        seal_receipt(receipt(arm=arm, spans=spans, propensity=share), NAME, KEY)
        for arm, spans, share in (
            ("serving", [(7, 10)], 0.75), ("candidate", [(70_000, 10)], 0.25), ("serving", [], 1.0)
        )
    ]  # fmt: skip
    assert len({len(text) for text in texts}) == 1
    assert len(set(texts)) == 3
    assert seal_receipt(receipt(), NAME, KEY) != seal_receipt(receipt(), NAME, KEY)
    for text in texts:
        box = base64.urlsafe_b64decode(text.split(".")[2] + "==")
        assert b"serving" not in box
        assert b"candidate" not in box
        assert receipt().answer.encode() not in box


def test_no_change_of_one_character_is_another_receipt():
    text = seal_receipt(receipt(), NAME, KEY)
    for place in range(len(text)):
        for character in "A.-":
            changed = text[:place] + character + text[place + 1 :]
            if changed != text:
                assert read_receipt(changed, keys=KEYS, run=RUN) is None
        assert read_receipt(text[:place], keys=KEYS, run=RUN) is None


def test_a_sealed_payload_that_is_no_receipt_is_refused():
    wrong = msgspec.structs.replace(receipt(), propensity=2.0)
    text = seal_receipt(wrong, NAME, KEY)
    assert read_receipt(text, keys=KEYS, run=RUN) is None


def test_a_receipt_of_an_earlier_release_is_read_if_its_key_was_adopted():
    payload = msgspec.msgpack.encode(receipt())
    parts = (payload, SIGNER.sign(DOMAIN + payload))
    text = ".".join(["dw1", *(base64.urlsafe_b64encode(p).rstrip(b"=").decode() for p in parts)])
    adopted = ReceiptKeys({NAME: KEY}, frozenset({SIGNER.public_key}))
    assert read_receipt(text, keys=adopted, run=RUN) == receipt()
    assert read_receipt(text, keys=adopted, run="f" * 32) is None
    assert read_receipt(text[:-2], keys=adopted, run=RUN) is None
    assert read_receipt(text, keys=KEYS, run=RUN) is None


def test_tokens_cannot_move_between_prompt_and_answer():
    assert hash_tokens([1, 2], [3]) != hash_tokens([1], [2, 3])
    assert spans_of([7, 7, 8]) == [(7, 2), (8, 1)]


def test_a_segment_is_of_one_place_and_its_arrays_agree():
    data = encode_segment("g0", 4, [encode_row(capture())])
    (row,) = decode_segment(data, Capture, gateway="g0", number=4, run="r", key="k")
    assert row == capture()
    assert row.token_versions.tolist() == [7, 8]
    for gateway, number in (("g1", 4), ("g0", 5)):
        with pytest.raises(CorruptError, match="another place"):
            decode_segment(data, Capture, gateway=gateway, number=number, run="r", key="k")
    with pytest.raises(CorruptError):
        decode_segment(data, Feedback, gateway="g0", number=4, run="r", key="k")


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"spans": [(7, 1)]}, "versions"),
        ({"logprobs": b""}, "lengths"),
        ({"prompt": b""}, "no tokens"),
        ({"logprobs": np.full(2, np.nan, "<f4").tobytes()}, "log-probabilities"),
        ({"tokens": np.array([-1, 1], "<i4").tobytes()}, "negative"),
    ],
)
def test_a_capture_that_contradicts_itself_is_refused(changes, fault):
    assert fault in capture(**changes).fault()
    assert not capture(**changes, unusable="a reason").fault()
    data = encode_segment("g0", 0, [encode_row(capture(**changes))])
    with pytest.raises(CorruptError, match="a capture"):
        decode_segment(data, Capture, gateway="g0", number=0, run="r", key="k")


def decision(share):
    versions = (ServedVersion(4, "0" * 32), ServedVersion(5, "1" * 32))
    return Decision(
        number=0, run=RUN, verdict="canary", serving=versions[0], candidate=versions[1],
        share=share, salt="s", at=1e9, by="g0",
    )  # fmt: skip


def test_a_user_keeps_its_arm_as_the_share_grows():
    users = [f"{number:032x}" for number in range(2000)]
    before = set()
    for share in (0.01, 0.05, 0.25, 0.5, 1.0):
        found = [assign(decision(share), user) for user in users]
        chosen = {user for user, one in zip(users, found, strict=True) if one.arm == "candidate"}
        assert before <= chosen
        assert abs(len(chosen) / len(users) - share) < 0.03
        for one in found:
            assert one.propensity == pytest.approx(share if one.version == 5 else 1 - share)
        before = chosen
    assert assign(decision(1.0), "") == ("serving", 1.0, 4, 0.0)
    assert assign(None, users[0]) == ("serving", 1.0, None, 0.0)

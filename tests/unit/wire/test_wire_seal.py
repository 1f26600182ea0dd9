"""Seals and signatures: one turned bit anywhere is noticed, and so is another's key."""

import errno
import json
import os

import msgspec
import pytest

from deltawire.errors import CorruptError, InputError
from deltawire.testing.faulty import flip_bit
from deltawire.wire.seal import check_signature, seal, seal_json, unseal
from deltawire.wire.signing import Ed25519Signer, verify


class Thing(msgspec.Struct, tag_field="format", tag=1):
    name: str
    number: int = 0


SIGNER = Ed25519Signer(bytes(range(32)))
OTHER = Ed25519Signer(bytes(32))


def read(data, signer=None, key="a/b"):
    if signer is not None:
        check_signature(data, public_key=signer.public_key, verify=verify, run="r", key=key)
    return unseal(data, Thing, run="r", key=key)


@pytest.mark.parametrize("signer", [None, SIGNER], ids=["sealed", "signed"])
def test_round_trip_and_plain_json(signer):
    data = seal(Thing("a", 5), key="a/b", signer=signer)
    assert read(data, signer) == Thing("a", 5)
    assert json.loads(data)["name"] == "a"
    assert data.endswith(b'"}\n')
    assert data.count(b"\n") == 1


@pytest.mark.parametrize("signer", [None, SIGNER], ids=["sealed", "signed"])
def test_every_single_bit_is_noticed(signer):
    data = seal(Thing("é", 5), key="a/b", signer=signer)
    for number in range(8 * len(data)):
        with pytest.raises(CorruptError):
            read(flip_bit(data, number))


def test_truncation_and_trailing_bytes_are_detected():
    data = seal(Thing("a"), key="a/b")
    for wrong in [data[:length] for length in range(len(data))] + [data + b"\n", data + data]:
        with pytest.raises(CorruptError, match="seal"):
            read(wrong)


def test_a_signature_is_for_one_key_of_the_bucket_and_one_signer():
    data = seal(Thing("a"), key="a/b", signer=SIGNER)
    read(data, SIGNER)
    with pytest.raises(CorruptError, match="not made with the owner's key"):
        read(data, OTHER)
    with pytest.raises(CorruptError, match="not made with the owner's key"):
        read(data, SIGNER, key="a/c")
    with pytest.raises(CorruptError, match="not signed"):
        read(seal(Thing("a"), key="a/b"), SIGNER)


def test_a_signature_cannot_be_taken_over_to_other_content():
    """A writer that can seal but not sign cannot reuse the old signature."""
    signed = seal(Thing("a", 1), key="a/b", signer=SIGNER)
    body = signed.replace(b'"number":1', b'"number":2').rpartition(b',"blake3"')[0]
    forged = seal_json(body + b"}", key="a/b")
    assert read(forged).number == 2
    with pytest.raises(CorruptError, match="not made with the owner's key"):
        read(forged, SIGNER)


def test_a_signature_names_its_role():
    """A key that may sign groups must not sign manifests, even if it is the owner's own."""
    data = seal(Thing("a"), key="a/b", signer=SIGNER, role="worker:w1")
    assert json.loads(data)["signer"] == "worker:w1"
    with pytest.raises(CorruptError, match="signed in the role 'worker:w1', not as 'owner'"):
        read(data, SIGNER)
    check = {"public_key": SIGNER.public_key, "verify": verify, "run": "r", "key": "a/b"}
    check_signature(data, role="worker:w1", **check)
    other = data.replace(b"worker:w1", b"owner").rpartition(b',"blake3"')[0]
    with pytest.raises(CorruptError, match="not made with the owner's key"):
        read(seal_json(other + b"}", key="a/b"), SIGNER)


def test_an_object_without_a_format_or_with_a_member_twice_is_refused():
    for body, reason in (
        (b'{"name":"a"}', "format"),
        (b'{"format":2,"name":"a"}', "reads format 1"),
        (b'{"format":1,"name":"a","name":"b"}', "twice"),
        (b'{"format":1,"name":"a","x":{"y":1,"y":1}}', "twice"),
    ):
        with pytest.raises(CorruptError, match=reason):
            read(seal_json(body, key="a/b"))


def test_keys_are_kept_in_files_for_their_owner(tmp_path):
    path = tmp_path / "key"
    signer = Ed25519Signer.generate()
    signer.write(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert Ed25519Signer.read(path).public_key == signer.public_key
    with pytest.raises(InputError, match="exists already"):
        OTHER.write(path)
    (tmp_path / "bad").write_text("zz")
    (tmp_path / "short").write_text("00" * 31)
    for bad, message in (("bad", "no key"), ("short", "no key"), ("none", "No such file")):
        with pytest.raises(InputError, match=message):
            Ed25519Signer.read(tmp_path / bad)
    with pytest.raises(InputError, match="32 bytes"):
        Ed25519Signer(b"short")
    assert not verify("00", b"", b"")


def test_a_key_that_the_disk_did_not_take_leaves_its_name_free(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("deltawire.wire.signing.os.fdopen", lambda fd, mode: Full(fd))
        with pytest.raises(InputError, match="No space left"):
            Ed25519Signer.generate().write(tmp_path / "key")
    assert list(tmp_path.iterdir()) == []


class Full:
    """A file on a full disk."""

    def __init__(self, descriptor):
        self.descriptor = descriptor

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self.descriptor)

    def write(self, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

"""Every member of every object, missing, wrong, at its limit and beyond: the reader of this release
and the one that was written from the document give the same answer.
"""

import copy
import json
from contextlib import nullcontext
from functools import partial

import msgspec
import pytest
from blake3 import blake3

from deltawire.errors import CorruptError
from deltawire.store import open_bucket
from deltawire.sync.chain.objects import find_run, read_compacted_delta, read_manifest
from deltawire.testing import object_reader as rows
from deltawire.testing.payload_reader import FormatError
from deltawire.testing.reader import Reader
from deltawire.wire import keys, manifest, run
from deltawire.wire.objects import MAX_DEPTH
from deltawire.wire.payload import BlobRef, Payload, Piece
from deltawire.wire.piece_table import encode_table, payload_ref
from deltawire.wire.seal import seal_json

LONGEST = 1 << 14
"""Longer values than this take seconds: the test of large ones has them."""
HASH = "cd" * 32
SUM = "0123456789abcdef" * 2
RUN = {
    "format": 1, "id": "ab" * 16, "name": "r", "created_at": 1.5, "digest": SUM, "chunk": 16,
    "tensors": [{"name": "w", "shape": [3], "dtype": "U8"}],
    "aliases": {"tied": "w"}, "public_key": "",
    "model_files": [{"name": "config.json", "blob": HASH, "bytes": 7}],
    "config": {"any": [1, None, "é"]},
}  # fmt: skip


def table():
    return run.decode_run(sealed(RUN), run="r", key=keys.RUN)


def sealed(members):
    return seal_json(json.dumps(members).encode(), key=keys.RUN)


def payload(total):
    pieces = [Piece(0, 0, 3, 0, 0, 5, total, "00" * 16)]
    encoded = encode_table(Payload([BlobRef(HASH, 5)], pieces), table())
    ref = payload_ref(Payload([BlobRef(HASH, 5)], pieces), encoded)
    return json.loads(msgspec.json.encode(ref))


def objects():
    """A valid object of each kind, by the key at which it is."""
    stated = {"run": RUN["id"], "version": 4, "line": "main", "base": 3, "base_digest": "0" * 32}
    version = {
        "format": 1, **stated, "delta": payload(SUM), "anchor": payload(SUM), "digest": SUM,
        "epoch": 1, "nonce": "n", "created_at": 2.0, "pruned": False,
        "model_files": RUN["model_files"], "metadata": {"step": 3, "more": {"deep": [[]]}},
    }  # fmt: skip
    compacted = {
        "format": 1, **stated, "payload": payload(SUM), "digest": SUM, "created_at": 2,
    }  # fmt: skip
    return {
        keys.RUN: (RUN, rows.RUN),
        keys.manifest(4): (version, rows.MANIFEST),
        keys.compacted(3, 4): (compacted, rows.COMPACTED),
    }


def read_run(data):
    bucket = open_bucket("memory://")
    bucket.put(keys.RUN, data)
    return find_run(bucket)


def answers(key, data):
    """Returns whether this release's reader accepts an object, and whether the plain one does."""
    name = "r"
    decode = {
        keys.RUN: read_run,
        keys.manifest(4): partial(
            manifest.decode_manifest, version=4, table=table(), run=name, key=key
        ),
        keys.compacted(3, 4): partial(
            manifest.decode_compacted, base=3, version=4, table=table(), run=name, key=key
        ),
    }[key]
    try:
        decode(data)
        ours = True
    except CorruptError:
        ours = False
    try:
        stored = {keys.RUN: sealed(RUN), key: data}
        reader = Reader(stored.get)
        if key == keys.manifest(4):
            reader.manifest(4)
        elif key != keys.RUN:
            reader.compacted(4, 3)
        plain = True
    except FormatError:
        plain = False
    return ours, plain


WRONG = {
    "true": True, "one": 1, "minus one": -1, "a float": 1.0, "a half": 0.5, "text": "x",
    "no text": "", "null": None, "an array": [], "an object": {}, "an array of arrays": [[]],
    "huge": 1 << 64, "upper case": "AB" * 16, "a line more": "main\n", "half a base64": "RFc",
    "an address as base64": "RF-_", "blanks in base64": "RF c=", "bits left in base64": "RFf=",
}  # fmt: skip


def values_of(member):
    """Values at the limits of a member and one beyond them, by name."""
    found = dict(WRONG)
    text = (member.characters or "x")[0]
    for edge, name in ((member.least, "least"), (member.most, "most")):
        for size in (edge - 1, edge, edge + 1):
            if size < 0 and member.type != "integer":
                continue
            if member.type == "integer" and size < 1 << 60:
                found[f"{name} {size}"] = int(size)
            if size > LONGEST:
                continue
            if member.type == "string":
                found[f"{name} {size}"] = text * int(size)
                found[f"{name} {size} of two bytes"] = "é" * int(size)
            if member.type == "array" and isinstance(member.of, rows.Member):
                each = SAMPLES.get(id(member.of.of), 0)
                found[f"{name} {size}"] = [each] * int(size)
    return found


SAMPLES = {id(rows.RUN.members["model_files"].of.of): RUN["model_files"][0]}


def changes(members, kind, path=()):
    """Each member of an object and of the objects in it: its path, a name, and the changed value;
    the value None of the name *missing* removes it."""
    for name, member in kind.members.items():
        here = (*path, name)
        yield here, "missing", None
        for label, value in values_of(member).items():
            yield here, label, value
        inner = member.of.of if isinstance(member.of, rows.Member) else member.of
        held = members.get(name)
        if isinstance(inner, rows.Kind) and held:
            first = held[0] if isinstance(held, list) else held
            yield from changes(first, inner, (*here, 0) if isinstance(held, list) else here)


def changed(members, path, label, value):
    result = copy.deepcopy(members)
    place = result
    for step in path[:-1]:
        place = place[step]
    if label == "missing":
        place.pop(path[-1], None)
    else:
        place[path[-1]] = value
    return result


@pytest.mark.parametrize("key", objects())
def test_every_member_of_every_object(key):
    members, kind = objects()[key]
    assert answers(key, sealed(members)) == (True, True)
    found = {
        (path, label): answers(key, sealed(changed(members, path, label, value)))
        for path, label, value in changes(members, kind)
    }
    assert {where: each for where, each in found.items() if each[0] != each[1]} == {}
    taken = sum(ours for ours, _ in found.values())
    assert taken > 20
    assert len(found) - taken > 200


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("tensors", marks=pytest.mark.drills),
        pytest.param("aliases", marks=pytest.mark.drills),
        "config",
        "metadata",
        "shape",
    ],
)
@pytest.mark.parametrize("beyond", [0, 1])
def test_large_values_at_their_limits(name, beyond):
    key, members = keys.RUN, copy.deepcopy(RUN)
    if name == "tensors":
        tensors = [{"name": f"{i}", "shape": [0], "dtype": "U8"} for i in range((1 << 18) + beyond)]
        members |= {"tensors": tensors, "aliases": {}}
    elif name == "aliases":
        members["aliases"] = {f"{i}": "w" for i in range((1 << 18) + beyond)}
    elif name == "shape":
        members["tensors"][0]["shape"] = [1] * (16 + beyond)
    else:
        key = keys.RUN if name == "config" else keys.manifest(4)
        members = copy.deepcopy(objects()[key][0])
        members[name] = {"é": "x"}
        # Counted as the bytes of the value where it stands, here with an escaped character.
        size = len(json.dumps(members[name]))
        members[name]["é"] += "x" * ((1 << 20) - size + beyond)
    assert answers(key, sealed(members)) == (not beyond,) * 2


@pytest.mark.parametrize("key", objects())
@pytest.mark.parametrize("beyond", [0, 1])
def test_an_object_of_too_many_bytes_is_refused(key, beyond):
    """The store's answer is refused before it is read; white space makes it so large here."""
    most = {keys.RUN: 1 << 26}.get(key, 1 << 21)
    members = json.dumps(objects()[key][0]).encode()
    blank = b" " * (most - len(sealed(objects()[key][0])) + beyond)
    data = seal_json(members[:-1] + blank + b"}", key=key)
    assert len(data) == most + beyond
    bucket = open_bucket("memory://")
    bucket.put(keys.RUN, sealed(RUN))
    bucket.put(key, data)
    read = {
        keys.RUN: lambda: find_run(bucket),
        keys.manifest(4): lambda: read_manifest(bucket, table(), 4),
        keys.compacted(3, 4): lambda: read_compacted_delta(bucket, table(), 3, 4),
    }[key]
    with nullcontext() if not beyond else pytest.raises(CorruptError):
        assert read() is not None
    if key != keys.RUN:
        assert answers(key, data)[1] == (not beyond)


def raw(member):
    return b'{"format":1,' + member + b"," + json.dumps(RUN).encode()[len('{"format": 1,') :]


@pytest.mark.parametrize(
    ("member", "taken"),
    [
        (b'"new":{"a":[1,2]}', True),
        (b'"new":-0', True),
        (b'"new":[%s]' % (b"9" * 308), True),
        (b'"new":[%s]' % (b"9" * 309), False),
        (b'"new":[%s]' % (b"9" * 5000), False),
        (b'"new":1.7976931348623157e308', True),
        (b'"new":1e309', False),
        (b'"new":-1e309', False),
        (b'"new":1e-400', True),
        (b'"new":NaN', False),
        (b'"new":01', False),
        (b'"new": \t\r\n [ 1 , 2 ]', True),
        (b'"new":"\\ud83d\\ude00"', True),
        (b'"new":"\\\\ud83d"', True),
        (b'"new":"\\ud83d"', False),
        (b'"new":"\\ude00"', False),
        (b'"new":"\\ud83dx\\ude00"', False),
        (b'"new":"\\ud83d\\n\\ude00"', False),
        (b'"new":"\\ud83d\\ud83d\\ude00"', False),
        (b'"\\ud83d":1', False),
        (b'"new":"\xff"', False),
        (b'"new":"\xed\xa0\x80"', False),
        (b'"new":"\x01"', False),
        (b'"new":{"a":1,"a":1}', False),
        (b'"new":{"a":1,"\\u0061":1}', False),
        (b'"id":"%s"' % (b"ab" * 16), False),
        (b'"new":%s%s' % (b"[" * (MAX_DEPTH - 1), b"]" * (MAX_DEPTH - 1)), True),
        (b'"new":%s%s' % (b"[" * MAX_DEPTH, b"]" * MAX_DEPTH), False),
        (b'"new":%s1%s' % (b'{"a":' * (MAX_DEPTH - 1), b"}" * (MAX_DEPTH - 1)), True),
        (b'"new":%s1%s' % (b'{"a":' * MAX_DEPTH, b"}" * MAX_DEPTH), False),
        (b'"new":%s%s' % (b"[" * 900, b"]" * 900), False),
        (b'"new":%s' % (b"[" * 100_000), False),
        (b'"new":["%s"]' % (b"[" * 1000), True),
        (b'"new":["\\"%s"]' % (b"[" * 1000), True),
        (b'"new":[%s]' % b",".join([b"[[]]"] * 1000), True),
        (b'"new":tru', False),
        (b'"new":"', False),
    ],
)
def test_json_at_its_edges(member, taken):
    data = seal_json(raw(member), key=keys.RUN)
    assert answers(keys.RUN, data) == (taken, taken)


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ({}, True),
        ({"base": 3}, False),
        ({"base_digest": SUM}, False),
        ({"base_digest": "0" * 32}, True),
        ({"model_files": []}, False),
        ({"anchor": payload(SUM)}, False),
        ({"delta": payload(SUM), "base": 3}, False),
    ],
)
def test_a_tombstone_has_no_base_and_no_payload(change, taken):
    bare = {
        "format": 1, "run": RUN["id"], "version": 4, "digest": SUM, "epoch": 1, "nonce": "n",
        "created_at": 2.0, "pruned": True,
    }  # fmt: skip
    key = keys.manifest(4)
    assert answers(key, sealed(bare | change)) == (taken, taken)


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ({"head": "00" * 16}, False),
        ({"bytes": 12}, False),
        ({"blob": HASH}, False),
        ({"inline": ""}, False),
        ({"inline": "", "blob": HASH, "bytes": 12}, False),
        ({"inline": "", "blob": HASH, "head": "00" * 16}, False),
        ({"inline": "", "blob": HASH, "head": "00" * 16, "bytes": 76}, True),
        ({"pieces": 2}, False),
        ({"blobs": 2}, False),
    ],
)
def test_a_table_is_in_one_place(change, taken):
    key = keys.manifest(4)
    members = copy.deepcopy(objects()[key][0])
    members["delta"]["table"] |= change
    assert answers(key, sealed(members)) == (taken, taken)


def test_a_version_that_is_its_own_base_ends_the_plain_reader():
    key = keys.manifest(4)
    members = objects()[key][0] | {"base": 4}
    assert answers(key, sealed(members)) == (False, False)


def test_the_first_piece_of_a_segment_states_no_place():
    """The segment's entry in the index does; both readers refuse a second statement."""
    key, members = keys.manifest(4), copy.deepcopy(objects()[keys.manifest(4)][0])
    del members["delta"], members["base"]
    first = Piece(0, 0, 3, 0, 0, 5, SUM, "00" * 16)
    whole = bytearray(encode_table(Payload([BlobRef(HASH, 5)], [first]), table()))
    at = 12 + 32 + 16 + 32
    flagged = bytes([whole[at] | 1, 0, 0]) + whole[at + 1 : -40]
    entry = whole[12 : 12 + 12] + len(flagged).to_bytes(4, "little")
    index = entry + blake3(flagged).digest(16)
    head = whole[:12] + entry + blake3(bytes(index)).digest(16) + whole[44:60]
    data = bytes(head + index) + flagged + bytes(whole[-40:])
    anchor = members["anchor"]["table"]
    assert answers(key, sealed(members)) == (True, True)
    anchor["inline"] = msgspec.json.encode(data).decode().strip('"')
    assert answers(key, sealed(members)) == (False, False)

"""An independent reader of runs, in plain Python: the format's document, executable.

With `deltawire.testing.payload_reader`, its codec, it shares no code with the rest of deltawire
and needs the standard library and ``blake3`` only, so
that tests can hold the real reader and writer to something that was written from the document. It
is slow (about a microsecond per decision) and keeps whole tensors as lists of integers.

Example::

    from pathlib import Path
    from deltawire.testing.reader import Reader

    folder = Path("runs/golden")
    reader = Reader(lambda key: (folder / key).read_bytes())
    tensors = reader.read(8)  # name -> the bits of each element, flat, row-major
"""

from __future__ import annotations

import json
import re
import struct
from base64 import b64decode
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

from blake3 import blake3

from deltawire.testing.payload_reader import (
    ByteReader,
    decode_anchor,
    decode_delta,
    require,
)

WIDTHS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F8_E8M0": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64,
}  # fmt: skip
"""The bits of an element of each dtype."""

MASK64 = (1 << 64) - 1
LOW32 = (1 << 32) - 1
CODEC = "dw1"

Get = Callable[[str], bytes | None]
Verify = Callable[[str, bytes, bytes], bool]


def open_sealed(
    data: bytes, key: str, *, public_key: str = "", verify: Verify | None = None
) -> dict[str, Any]:
    """Returns the members of a sealed object, its seal checked and, with ``verify``, its
    signature."""
    seal = re.fullmatch(rb',"blake3":"([0-9a-f]{64})"\}\n', data[-78:])
    require(seal is not None, "no seal")
    assert seal is not None
    require(blake3(data[:-78]).hexdigest().encode() == seal[1], "the seal does not match")
    if public_key and verify is not None:
        signature = re.fullmatch(rb',"signature":"([0-9a-f]{128})"', data[-221:-78])
        require(signature is not None, "not signed")
        assert signature is not None
        message = b"deltawire sealed object 1\0" + key.encode() + b"\0" + data[:-221]
        require(data[:-221].endswith(b',"signer":"owner"'), "signed in another role")
        signed = bytes.fromhex(signature[1].decode())
        require(verify(public_key, signed, message), "the signature does not match")
    members: dict[str, Any] = json.loads(data, object_pairs_hook=_distinct)
    require(members.get("format") == 1, "another format")
    return members


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    require(len({name for name, _ in pairs}) == len(pairs), "a member is stated twice")
    return dict(pairs)


def digest_of(name: str, elements: Iterable[tuple[int, int]], width: int) -> tuple[int, int]:
    """Both lanes of the digest of (index, bits) pairs of the tensor ``name``."""
    key = int.from_bytes(blake3(name.encode()).digest()[:8], "little")
    lane0 = lane1 = 0
    for index, bits in elements:
        if width == 64:
            units = ((2 * index, bits & LOW32), (2 * index + 1, bits >> 32))
        else:
            units = ((index, bits),)  # type: ignore[assignment]
        for u, b in units:
            x = key + (u + 1) * 0x9E3779B97F4A7C15 & MASK64
            p = ((x & LOW32) ^ b) * ((x >> 32) | 1) & MASK64
            q = p ^ p >> 29
            lane0 += q
            lane1 += (q & LOW32) * ((q >> 32) ^ (x & LOW32))
    return lane0 & MASK64, lane1 & MASK64


def add_digests(parts: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """The sum of digests, lane by lane."""
    lane0 = lane1 = 0
    for first, second in parts:
        lane0, lane1 = lane0 + first, lane1 + second
    return lane0 & MASK64, lane1 & MASK64


def to_hex(digest: tuple[int, int]) -> str:
    """A digest as objects write it: lane 0, then lane 1."""
    return f"{digest[0]:016x}{digest[1]:016x}"


def from_hex(text: str) -> tuple[int, int]:
    """The lanes of a digest that an object states."""
    return int(text[:16], 16), int(text[16:], 16)


class ReadPiece(NamedTuple):
    """A piece as its table states it."""

    tensor: int
    start: int
    elements: int
    blob: int
    offset: int
    length: int
    sum: str
    hash: str


def decode_table(
    data: bytes, stated: dict[str, Any], counts: Sequence[int], chunk: int
) -> tuple[list[ReadPiece], list[tuple[str, int]]]:
    """The pieces and the blobs (hash and size) of a table; ``counts`` are elements of tensors."""
    head = ByteReader(data)
    require(head.take(4) == b"DWT1", "not a piece table")
    n, m = head.number(4), head.number(4)
    require((n, m) == (stated["pieces"], stated["blobs"]), "the table of another payload")
    pages = _entries(head, -(-n // 512))
    hashes = [head.take(16) for _ in range(-(-m // 8))]
    if "head" in stated:
        require(_half(data[: head.at]) == bytes.fromhex(stated["head"]), "the head's hash")
    entries: list[tuple[int, int, int, bytes]] = []
    for number, (tensor, start, size, found) in enumerate(pages):
        index = ByteReader(head.take(32 * min(16, -(-n // 32) - 16 * number)))
        require(_half(index.data) == found, "a page's hash")
        listed = _entries(index, len(index.data) // 32)
        require(listed[0][:2] == (tensor, start), "a page of another place")
        require(sum(entry[2] for entry in listed) == size, "a page of another length")
        entries += listed
    pieces: list[ReadPiece] = []
    for number, (tensor, start, size, found) in enumerate(entries):
        segment = head.take(size)
        require(_half(segment) == found, "a segment's hash")
        here = min(32, n - 32 * number)
        pieces += _decode_segment(segment, here, tensor, start, counts, chunk)
    blobs: list[tuple[str, int]] = []
    for number, found in enumerate(hashes):
        segment = head.take(40 * min(8, m - 8 * number))
        require(_half(segment) == found, "a segment's hash")
        for hash_, size in struct.iter_unpack("<32sQ", segment):
            blobs.append((hash_.hex(), size))
    require(not head.rest(), "bytes after the table")
    return pieces, blobs


def _entries(data: ByteReader, count: int) -> list[tuple[int, int, int, bytes]]:
    return [(data.number(4), data.number(8), data.number(4), data.take(16)) for _ in range(count)]


def _decode_segment(
    data: bytes, here: int, tensor: int, end: int, counts: Sequence[int], chunk: int
) -> list[ReadPiece]:
    segment, pieces = ByteReader(data), list[ReadPiece]()
    blob = offset = 0
    for number in range(here):
        length, flags = divmod(segment.varint(), 16)
        start = end
        if flags & 1:
            gap, place = segment.varint(), segment.varint()
            tensor, start = tensor + gap, place if gap else end + place
        elif number and end == counts[tensor]:
            later = [t for t in range(tensor + 1, len(counts)) if counts[t]]
            require(bool(later), "a piece after the last tensor")
            tensor, start = later[0], 0
        require(tensor < len(counts), "no such tensor")
        rest = min(chunk - start % chunk, counts[tensor] - start)
        count = segment.varint() if flags & 2 else rest
        if flags & 4:
            blob, offset = segment.varint(), 0
        if flags & 8:
            offset = segment.varint()
        total, hash_ = segment.take(16).hex(), segment.take(16).hex()
        pieces.append(ReadPiece(tensor, start, count, blob, offset, length, total, hash_))
        end, offset = start + count, offset + length
    require(not segment.rest(), "bytes after a segment's pieces")
    return pieces


def _half(data: bytes) -> bytes:
    return blake3(data).digest()[:16]


class Reader:
    """Reads versions of a run, from ``get``, which returns the object at a key or None.

    ``verify(public_key, signature, message)`` checks Ed25519, which the standard library has not;
    without it, signatures are not checked.
    """

    def __init__(self, get: Get, *, verify: Verify | None = None) -> None:
        self._get = get
        self._verify = verify
        self._key = ""
        self.run = self.object("run.json")
        self._key = self.run.get("public_key", "")
        if self._key:
            self.object("run.json")
        self.names = [spec["name"] for spec in self.run["tensors"]]
        require(len(set(self.names)) == len(self.names), "a tensor is listed twice")
        unknown = {spec["dtype"] for spec in self.run["tensors"]} - WIDTHS.keys()
        require(not unknown, f"unknown dtypes {sorted(unknown)}")
        self.widths = [WIDTHS[spec["dtype"]] for spec in self.run["tensors"]]
        self.counts = [prod(spec["shape"]) for spec in self.run["tensors"]]
        self.chunk = self.run.get("chunk", 1 << 22)

    def object(self, key: str) -> dict[str, Any]:
        """The members of the sealed object at ``key``."""
        data = self._get(key)
        require(data is not None, f"{key} is missing")
        assert data is not None
        return open_sealed(data, key, public_key=self._key, verify=self._verify)

    def manifest(self, version: int) -> dict[str, Any]:
        """The manifest of ``version``, checked."""
        found = self.object(f"weights/manifests/{version:010d}.json")
        require((found["run"], found["version"]) == (self.run["id"], version), "of another run")
        require(found.get("line", "main") == "main", "of another line")
        return found

    def compacted(self, target: int, base: int | None) -> dict[str, Any]:
        """The compacted delta from ``base`` to ``target``, or its later anchor, checked."""
        name = "anchor" if base is None else f"{base:010d}"
        found = self.object(f"weights/compacted/{target:010d}-{name}.json")
        stated = (found["run"], found["version"], found.get("base"))
        require(stated == (self.run["id"], target, base), "of another version")
        return found

    def read(self, version: int) -> dict[str, list[int]]:
        """The bits of every tensor at ``version``: the newest anchor at or before it, and the
        deltas since."""
        way = [self.manifest(version)]
        while (anchor := self.anchor_of(way[-1])) is None:
            require(way[-1].get("base") is not None, "retention has taken this version")
            way.append(self.manifest(way[-1]["base"]))
        tensors = self.anchor(way[-1], anchor)
        for later, earlier in pairwise(reversed(way)):
            require(earlier["base_digest"] == later["digest"], "of another base")
            tensors = self.advance(tensors, earlier, earlier["delta"])
        return dict(zip(self.names, tensors, strict=True))

    def anchor_of(self, manifest: dict[str, Any]) -> dict[str, Any] | None:
        """The payload of a version's anchor, in its manifest or made later; None without one."""
        if manifest.get("anchor"):
            stated: dict[str, Any] = manifest["anchor"]
            return stated
        target = manifest["version"]
        if self._get(f"weights/compacted/{target:010d}-anchor.json") is None:
            return None
        later = self.compacted(target, None)
        require(later["digest"] == manifest["digest"], "an anchor of another digest")
        payload: dict[str, Any] = later["payload"]
        return payload

    def anchor(self, stated: dict[str, Any], ref: dict[str, Any]) -> list[list[int]]:
        """Every tensor from an anchor."""
        tensors: list[list[int]] = [[] for _ in self.names]
        pieces = self.pieces(ref)
        for piece, coded in pieces:
            held, width = tensors[piece.tensor], self.widths[piece.tensor]
            require(len(held) == piece.start, "an anchor with a gap")
            held += decode_anchor(coded, piece.elements, width)
            elements = enumerate(held[piece.start :], start=piece.start)
            self._check_sum(piece, digest_of(self.names[piece.tensor], elements, width))
        require([len(held) for held in tensors] == self.counts, "an anchor that is not whole")
        self._check_digest((0, 0), [piece for piece, _ in pieces], stated)
        return tensors

    def advance(
        self, base: list[list[int]], stated: dict[str, Any], ref: dict[str, Any]
    ) -> list[list[int]]:
        """Every tensor after a delta or a compacted delta."""
        tensors = [list(elements) for elements in base]
        pieces = self.pieces(ref)
        for piece, coded in pieces:
            end, name = piece.start + piece.elements, self.names[piece.tensor]
            held, width = tensors[piece.tensor], self.widths[piece.tensor]
            changed = decode_delta(coded, held[piece.start : end], width)
            places = {piece.start + place: bits for place, bits in changed.items()}
            old = digest_of(name, ((i, held[i]) for i in places), width)
            new = digest_of(name, places.items(), width)
            self._check_sum(piece, (new[0] - old[0] & MASK64, new[1] - old[1] & MASK64))
            for place, bits in places.items():
                held[place] = bits
        self._check_digest(from_hex(stated["base_digest"]), [p for p, _ in pieces], stated)
        return tensors

    def pieces(self, ref: dict[str, Any]) -> list[tuple[ReadPiece, bytes]]:
        """The pieces of a payload with their bytes, in the order of the table."""
        codec = ref.get("codec", CODEC)
        since = ref.get("codec_since")
        newer = f"; release {since} or newer reads it" if since else ""
        require(codec == CODEC, f"the codec {codec!r} is unknown{newer}")
        table = ref["table"]
        data = b64decode(table["inline"]) if "inline" in table else self._blob(table["blob"])
        pieces, blobs = decode_table(data, table, self.counts, self.chunk)
        require(sum(size for _, size in blobs) == ref["bytes"], "blobs of other sizes")
        found = [self._blob(name) for name, _ in blobs]
        require([len(blob) for blob in found] == [size for _, size in blobs], "a blob's size")
        before = (0, 0)
        coded = []
        for piece in pieces:
            end = piece.start + piece.elements
            require(piece.elements >= 1 and piece.length >= 1, "an empty piece")
            require(end <= self.counts[piece.tensor], "a piece outside of its tensor")
            require(piece.start // self.chunk == (end - 1) // self.chunk, "a piece of two chunks")
            require((piece.tensor, piece.start) >= before, "pieces do not ascend")
            require(piece.blob < len(found), "no such blob")
            data = found[piece.blob][piece.offset : piece.offset + piece.length]
            require(len(data) == piece.length, "a piece outside of its blob")
            require(_half(data).hex() == piece.hash, "a piece's hash")
            before = (piece.tensor, end)
            coded.append((piece, data))
        return coded

    def _blob(self, name: str) -> bytes:
        data = self._get(f"weights/blobs/{name}")
        require(data is not None, f"blob {name} is missing")
        assert data is not None
        require(blake3(data).hexdigest() == name, f"blob {name} is damaged")
        return data

    def _check_sum(self, piece: ReadPiece, found: tuple[int, int]) -> None:
        require(to_hex(found) == piece.sum, f"a sum of tensor {self.names[piece.tensor]}")

    def _check_digest(
        self, base: tuple[int, int], pieces: list[ReadPiece], stated: dict[str, Any]
    ) -> None:
        total = add_digests([base, *(from_hex(piece.sum) for piece in pieces)])
        require(to_hex(total) == stated["digest"], "the version's digest")

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

from deltawire.testing.object_reader import COMPACTED, MANIFEST, RUN, Kind, read_members
from deltawire.testing.payload_reader import ByteReader, decode_anchor, decode_delta, require

WIDTHS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F8_E8M0": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64,
}  # fmt: skip
"""The bits of an element of each dtype."""

PRIME = (1 << 255) - 19
SMALL_ORDER = {
    0, 1, PRIME - 1, 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826,
    0x7A03AC9277FDC74EC6CC392CFA53202A0F67100D760B3CBA4FD84D3D706A17C7,
}  # fmt: skip
"""The y coordinates of the points of Ed25519 whose order divides 8."""

MASK64 = (1 << 64) - 1
LOW32 = (1 << 32) - 1
CODEC = "dw1"
FORK_CODEC = "dw1-fork"

Get = Callable[[str], bytes | None]
Verify = Callable[[str, bytes, bytes], bool]


def open_sealed(
    data: bytes, key: str, kind: Kind, *, public_key: str = "", verify: Verify | None = None
) -> dict[str, Any]:
    """Returns the members of a sealed object of a kind, its seal checked, its limits and, with
    ``verify``, its signature."""
    require(len(data) <= kind.most_bytes, "an object of too many bytes")
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
    return read_members(data, kind)


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
    require(len(data) <= 1 << 26, "a table of too many bytes")
    pages = _entries(head, -(-n // 512))
    hashes = [head.take(16) for _ in range(-(-m // 8))]
    if stated["head"]:
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
            require(bool(number), "the first piece of a segment states its place twice")
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
    without it, signatures are not checked. For a fork, ``above`` reads the run above it.
    """

    def __init__(
        self, get: Get, *, verify: Verify | None = None, above: Reader | None = None
    ) -> None:
        self._get = get
        self._above = above
        self._verify = verify
        self._key = ""
        self.run = self.object("run.json", RUN)
        self._key = self.run["public_key"]
        if self._key:
            y = int.from_bytes(bytes.fromhex(self._key), "little") & (1 << 255) - 1
            require(y < PRIME and y not in SMALL_ORDER, "a weak public key")
            self.object("run.json", RUN)
        self.names = [spec["name"] for spec in self.run["tensors"]]
        names = set(self.names)
        require(len(names) == len(self.names), "a tensor is listed twice")
        for alias, stored in self.run["aliases"].items():
            require(alias not in names and stored in names, "an alias of no tensor, or of one")
        unknown = {spec["dtype"] for spec in self.run["tensors"]} - WIDTHS.keys()
        require(not unknown, f"unknown dtypes {sorted(unknown)}")
        self.widths = [WIDTHS[spec["dtype"]] for spec in self.run["tensors"]]
        self.counts = [prod(spec["shape"]) for spec in self.run["tensors"]]
        self.chunk = self.run["chunk"]
        require(sum(self.counts) <= 1 << 48, "too many elements")
        chunks = sum(-(-count // self.chunk) for count in self.counts)
        require(chunks <= 1 << 20, "too many chunks")

    def object(self, key: str, kind: Kind) -> dict[str, Any]:
        """The members of the sealed object of a kind at ``key``, with their defaults."""
        data = self._get(key)
        require(data is not None, f"{key} is missing")
        assert data is not None
        return open_sealed(data, key, kind, public_key=self._key, verify=self._verify)

    def manifest(self, version: int) -> dict[str, Any]:
        """The manifest of ``version``, checked."""
        found = self.object(f"weights/manifests/{version:010d}.json", MANIFEST)
        require((found["run"], found["version"]) == (self.run["id"], version), "of another run")
        require(found["line"] == "main", "of another line")
        delta, anchor, base = found["delta"], found["anchor"], found["base"]
        require(version > 0 or found["digest"] == self.run["digest"], "another digest of version 0")
        if found["pruned"]:
            empty = (None, None, None, None, "0" * 32)
            stated = (delta, anchor, base, found["model_files"], found["base_digest"])
            require(stated == empty, "a tombstone with a payload")
            return found
        require(delta is not None or anchor is not None, "no payload")
        require((delta is None) == (base is None), "a delta without a base, or a base without it")
        require(base is None or base < version, "a base that is not earlier")
        require(version > 0 or anchor is not None, "version 0 without an anchor")
        for payload, start in ((delta, found["base_digest"]), (anchor, None)):
            if payload is not None:
                self._check_payload(payload, start, found["digest"])
        return found

    def _check_payload(self, payload: dict[str, Any], start: str | None, end: str) -> None:
        table, since = payload["table"], payload["codec_since"]
        in_blob = (table["blob"] != "", table["bytes"] != 0, table["head"] != "")
        require(in_blob == (not table["inline"],) * 3, "a table that is inline and in a blob")
        newer = f"; release {since} or newer reads it" if since else ""
        known = payload["codec"] == CODEC or (payload["codec"] == FORK_CODEC and table["blob"])
        require(bool(known), f"the codec {payload['codec']!r} is unknown{newer}")
        if table["inline"]:
            self.table(payload, start, end, 0)

    def compacted(self, target: int, base: int | None) -> dict[str, Any]:
        """The compacted delta from ``base`` to ``target``, or its later anchor, checked."""
        name = "anchor" if base is None else f"{base:010d}"
        found = self.object(f"weights/compacted/{target:010d}-{name}.json", COMPACTED)
        stated = (found["run"], found["version"], found["base"])
        require(stated == (self.run["id"], target, base), "of another version")
        require(found["line"] == "main", "of another line")
        require(base is None or base < target, "a base that is not earlier")
        start = None if base is None else found["base_digest"]
        self._check_payload(found["payload"], start, found["digest"])
        return found

    def read(self, version: int) -> dict[str, list[int]]:
        """The bits of every tensor at ``version``: the newest anchor at or before it, and the
        deltas since."""
        way = [self.manifest(version)]
        while (anchor := self.anchor_of(way[-1])) is None:
            require(way[-1]["base"] is not None, "retention has taken this version")
            way.append(self.manifest(way[-1]["base"]))
        tensors = self.anchor(way[-1], anchor)
        for later, earlier in pairwise(reversed(way)):
            require(earlier["base_digest"] == later["digest"], "of another base")
            tensors = self.advance(tensors, earlier, earlier["delta"])
        return dict(zip(self.names, tensors, strict=True))

    def anchor_of(self, manifest: dict[str, Any]) -> dict[str, Any] | None:
        """The payload of a version's anchor, in its manifest or made later; None without one."""
        if manifest["anchor"] is not None:
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
        for piece, coded in self.pieces(ref, None, stated):
            held, width = tensors[piece.tensor], self.widths[piece.tensor]
            held += decode_anchor(coded, piece.elements, width)
            elements = enumerate(held[piece.start :], start=piece.start)
            self._check_sum(piece, digest_of(self.names[piece.tensor], elements, width))
        return tensors

    def advance(
        self, base: list[list[int]], stated: dict[str, Any], ref: dict[str, Any]
    ) -> list[list[int]]:
        """Every tensor after a delta or a compacted delta."""
        tensors = [list(elements) for elements in base]
        for piece, coded in self.pieces(ref, stated["base_digest"], stated):
            end, name = piece.start + piece.elements, self.names[piece.tensor]
            held, width = tensors[piece.tensor], self.widths[piece.tensor]
            changed = decode_delta(coded, held[piece.start : end], width)
            places = {piece.start + place: bits for place, bits in changed.items()}
            old = digest_of(name, ((i, held[i]) for i in places), width)
            new = digest_of(name, places.items(), width)
            self._check_sum(piece, (new[0] - old[0] & MASK64, new[1] - old[1] & MASK64))
            for place, bits in places.items():
                held[place] = bits
        return tensors

    def table(
        self, ref: dict[str, Any], start: str | None, end: str, version: int
    ) -> tuple[list[ReadPiece], list[tuple[str, int]]]:
        """The pieces and blobs of a payload that leads from the digest ``start`` (None: an anchor,
        from nothing) to the digest ``end`` of ``version``, checked."""
        table = ref["table"]
        if table["inline"]:
            data = b64decode(table["inline"], validate=True)
        else:
            data = self._blob(table["blob"], version if ref["codec"] == FORK_CODEC else None)
            require(len(data) == table["bytes"], "a table of another size")
        pieces, blobs = decode_table(data, table, self.counts, self.chunk)
        require(sum(size for _, size in blobs) == ref["bytes"], "blobs of other sizes")
        require(all(size <= 1 << 36 for _, size in blobs), "a blob of too many bytes")
        before, covered = (0, 0), [0] * len(self.counts)
        for piece in pieces:
            last = piece.start + piece.elements
            require(piece.elements >= 1 and piece.length >= 1, "an empty piece")
            require(last <= self.counts[piece.tensor], "a piece outside of its tensor")
            require(piece.start // self.chunk == (last - 1) // self.chunk, "a piece of two chunks")
            require((piece.tensor, piece.start) >= before, "pieces do not ascend")
            require(piece.blob < len(blobs), "no such blob")
            inside = piece.offset + piece.length <= blobs[piece.blob][1]
            require(inside, "a piece outside of its blob")
            before = (piece.tensor, last)
            covered[piece.tensor] += piece.elements
        require(start is not None or covered == self.counts, "an anchor that is not whole")
        sums = add_digests([from_hex(start or "0" * 32), *(from_hex(p.sum) for p in pieces)])
        require(to_hex(sums) == end, "the version's digest")
        return pieces, blobs

    def pieces(
        self, ref: dict[str, Any], start: str | None, stated: dict[str, Any]
    ) -> list[tuple[ReadPiece, bytes]]:
        """The pieces of a payload of ``stated`` with their bytes, in the order of the table."""
        pieces, blobs = self.table(ref, start, stated["digest"], stated["version"])
        found = [self._blob(name) for name, _ in blobs]
        require([len(blob) for blob in found] == [size for _, size in blobs], "a blob's size")
        coded = []
        for piece in pieces:
            data = found[piece.blob][piece.offset : piece.offset + piece.length]
            require(_half(data).hex() == piece.hash, "a piece's hash")
            coded.append((piece, data))
        return coded

    def _blob(self, name: str, version: int | None = None) -> bytes:
        """A blob of the run or of one above it; as the piece table of ``version`` perhaps one that
        is in a manifest there."""
        data = self._found(name, version)
        require(data is not None, f"blob {name} is missing")
        assert data is not None
        require(blake3(data).hexdigest() == name, f"blob {name} is damaged")
        return data

    def _found(self, name: str, version: int | None) -> bytes | None:
        data = self._get(f"weights/blobs/{name}")
        if data is None and version is not None and self._above is not None:
            data = self._above.inline_table(name, version)
        if data is None and self._above is not None:
            data = self._above._found(name, version)
        return data

    def inline_table(self, name: str, version: int) -> bytes | None:
        """The piece table of this name in the manifest of ``version``, or in its later anchor."""
        for key in ("manifests/{:010d}.json", "compacted/{:010d}-anchor.json"):
            for text in _inline_tables(self._get("weights/" + key.format(version)) or b"{}"):
                data = b64decode(text)
                if blake3(data).hexdigest() == name:
                    return data
        return None

    def _check_sum(self, piece: ReadPiece, found: tuple[int, int]) -> None:
        require(to_hex(found) == piece.sum, f"a sum of tensor {self.names[piece.tensor]}")


def _inline_tables(stated: bytes) -> list[str]:
    """The inline tables of an object, as base64; none of a damaged one, which is as if missing."""
    try:
        found = json.loads(stated)
        payloads = [found.get(name) or {} for name in ("delta", "anchor", "payload")]
        texts = [one.get("table", {}).get("inline", "") for one in payloads]
        return [text for text in texts if isinstance(text, str) and b64decode(text) is not None]
    except (ValueError, AttributeError, RecursionError):
        return []

"""Finds a planted text in files, in every form in which a program may have stored it."""

import base64
import bz2
import gzip
import json
import lzma
import zlib

import numpy as np
import zstandard

DEPTH = 3
"""Archives in archives are opened so deep."""
MOST = 1 << 26
_STREAMS = {
    b"\x1f\x8b\x08": lambda data: zlib.decompressobj(31).decompress(data, MOST),
    b"\x78\x01": lambda data: zlib.decompressobj().decompress(data, MOST),
    b"\x78\x5e": lambda data: zlib.decompressobj().decompress(data, MOST),
    b"\x78\x9c": lambda data: zlib.decompressobj().decompress(data, MOST),
    b"\x78\xda": lambda data: zlib.decompressobj().decompress(data, MOST),
    b"\x28\xb5\x2f\xfd": lambda data: zstandard.ZstdDecompressor().decompressobj().decompress(data),
    b"BZh": lambda data: bz2.BZ2Decompressor().decompress(data, MOST),
    b"\xfd7zXZ\x00": lambda data: lzma.LZMADecompressor().decompress(data, MOST),
    b"PK\x03\x04": lambda data: zlib.decompressobj(-15).decompress(
        data[30 + int.from_bytes(data[26:28], "little") + int.from_bytes(data[28:30], "little") :],
        MOST,
    ),
}
_ERRORS = (zlib.error, zstandard.ZstdError, lzma.LZMAError, OSError, EOFError, ValueError)


def forms_of(text):
    """The text in UTF-8 and UTF-16, its bytes in hexadecimal and in base64 at each of its three
    offsets, and as byte tokens: integers of 16, 32 and 64 bits, floats, and lists of JSON."""
    data = text.encode()
    yield from (data, text.encode("utf-16-le"), data.hex().encode(), data.hex().upper().encode())
    for place in range(3):
        encoded = base64.b64encode(b"\0" * place + data)[4 if place else 0 : -4]
        yield from (encoded, encoded.translate(bytes.maketrans(b"+/", b"-_")))
    tokens = np.frombuffer(data, np.uint8)
    for kind in ("<u2", "<i4", "<i8", ">i4", "<f4"):
        yield tokens.astype(kind).tobytes()
    for separators in ((",", ":"), (", ", ": ")):
        yield json.dumps(tokens.tolist(), separators=separators)[1:-1].encode()


def opened(data, depth=DEPTH):
    """The bytes, and those of each compressed stream that begins anywhere in them."""
    yield data
    for magic, read in _STREAMS.items() if depth else ():
        at = data.find(magic)
        while at >= 0:
            try:
                found = read(data[at:])
            except _ERRORS:
                found = b""
            if found:
                yield from opened(found, depth - 1)
            at = data.find(magic, at + 1)


def holds(data, text):
    """Returns whether the bytes hold the text in any of its forms."""
    forms = list(forms_of(text))
    return any(form in part for part in opened(data) for form in forms)


def all_files(folder):
    """All files below a folder by their relative names, without the targets of links out of it."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def packed_copies(text):
    """Files that hold the text in ways that a search must see through."""
    data = b'{"note": "' + text.encode() + b'"}'
    tokens = np.frombuffer(text.encode(), np.uint8)
    return {
        "gzip": b"head" + gzip.compress(data) + b"tail",
        "zlib": zlib.compress(data),
        "zstd": b"\0" * 7 + zstandard.compress(data),
        "bz2": bz2.compress(data),
        "xz": lzma.compress(data),
        "zstd in gzip": gzip.compress(zstandard.compress(data)),
        "base64": base64.b64encode(b"ab" + data),
        "base64 of zstd": gzip.compress(base64.b64encode(data)),
        "tokens": b"x" + tokens.astype("<i4").tobytes(),
        "JSON": json.dumps({"tokens": [1, *tokens.tolist(), 2]}).encode(),
    }

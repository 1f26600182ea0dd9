"""Named byte strings in one file, as safetensors lays them out: the frame most formats share.

8 bytes of little-endian header length; a JSON object of name → dtype, shape, data_offsets; data.
Source: the format section of the safetensors README, github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Buffer = bytes | memoryview

_LENGTH: Final = struct.Struct("<Q")

_NUMPY: Final[dict[str, np.dtype[Any]]] = {
    "U8": np.dtype(np.uint8),
    "I32": np.dtype(np.int32),
    "BF16": np.dtype(np.uint16),
}


class Entry(NamedTuple):
    """One tensor of a file: its dtype as safetensors names it, and its flat elements, which for
    BF16 are uint16 bits."""

    dtype: str
    array: NDArray[Any]


def as_bytes(data: Buffer) -> Entry:
    """Bytes as an entry."""
    return Entry("U8", np.frombuffer(data, np.uint8))


def as_view(array: NDArray[Any]) -> memoryview:
    """The bytes of a contiguous array, not copied."""
    view: Any = array.reshape(-1).view(np.uint8)
    return memoryview(view)


def pack(entries: Mapping[str, Entry], metadata: Mapping[str, str] | None = None) -> list[Buffer]:
    """A file in parts, the header first; the data are not copied."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    parts: list[Buffer] = []
    at = 0
    for name, (dtype, array) in entries.items():
        end = at + array.nbytes
        header[name] = {"dtype": dtype, "shape": [array.size], "data_offsets": [at, end]}
        parts.append(as_view(array))
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [_LENGTH.pack(len(text)) + text, *parts]


def unpack(payload: Buffer) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Returns the arrays that `pack` was given, as views of ``payload``, and the metadata.

    Only for bytes that this process made itself; it does not validate them.
    """
    view = memoryview(payload)
    (length,) = _LENGTH.unpack_from(view)
    header = json.loads(bytes(view[8 : 8 + length]))
    metadata = header.pop("__metadata__", {})
    body = view[8 + length :]
    arrays = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        array = np.frombuffer(body[start:end], _NUMPY[entry["dtype"]])
        arrays[name] = array.reshape(math.prod(entry["shape"]))
    return arrays, metadata


def size_of(parts: Sequence[Buffer]) -> int:
    """Bytes of a file in parts."""
    return sum(len(part) for part in parts)

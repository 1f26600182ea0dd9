"""Row gaps, column gaps and new values, all of it through zstd level 1.

As in PULSESync (``grail/infrastructure/sparse_codec.py`` of one-covenant/grail, version 3.1): a
uint32 header length, JSON, then for each tensor the differences between the rows of neighbouring
changes, their columns (a difference within a row, absolute on a new one), and the raw new values,
each in the smallest of uint8, uint16 and int32 that holds them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import zstandard
from numpy.typing import NDArray

from benchmarks.pairs import Bf16Bits
from benchmarks.peers.base import Weights
from benchmarks.peers.container import Buffer

_LENGTH: Final = struct.Struct("<I")
_WIDTHS: Final[dict[str, np.dtype[Any]]] = {
    "u8": np.dtype(np.uint8),
    "u16": np.dtype(np.uint16),
    "i32": np.dtype(np.int32),
}


class RowColumnZstd:
    """Row and column gaps + zstd-1."""

    name = "rowcol-zstd1"
    used_by = "PULSE"

    def encode(self, old: Mapping[str, Bf16Bits], new: Mapping[str, Bf16Bits]) -> list[Buffer]:
        """One zstd frame for the whole model."""
        described: list[dict[str, Any]] = []
        arrays: list[NDArray[Any]] = []
        for name, before in old.items():
            after = new[name].reshape(-1)
            positions = np.flatnonzero(before.reshape(-1) != after)
            if not positions.size:
                continue
            rows, columns = np.divmod(positions, _columns(before.shape))
            row_gaps = np.diff(rows, prepend=0)
            column_gaps = np.diff(columns, prepend=0)
            opens = np.flatnonzero(row_gaps)
            column_gaps[opens] = columns[opens]
            row_width, narrow_rows = _narrow(row_gaps)
            column_width, narrow_columns = _narrow(column_gaps)
            described.append(
                {
                    "name": name,
                    "shape": list(before.shape),
                    "num_nonzero": int(positions.size),
                    "value_dtype": "bf16",
                    "row_dtype": row_width,
                    "col_dtype": column_width,
                }
            )
            arrays += [narrow_rows, narrow_columns, after[positions]]
        header = json.dumps({"version": 31, "tensors": described}).encode()
        content = b"".join(
            [_LENGTH.pack(len(header)), header, *(array.tobytes() for array in arrays)]
        )
        return [zstandard.ZstdCompressor(level=1).compress(content)]

    def decode(self, payload: Buffer, weights: Weights) -> None:
        """Sums the gaps of rows, then those of columns within each row, and scatters."""
        content = memoryview(zstandard.ZstdDecompressor().decompress(payload))
        (length,) = _LENGTH.unpack_from(content)
        at = _LENGTH.size + length
        for tensor in json.loads(bytes(content[_LENGTH.size : at]))["tensors"]:
            found = []
            for width in (_WIDTHS[tensor["row_dtype"]], _WIDTHS[tensor["col_dtype"]], np.uint16):
                array = np.frombuffer(content, width, tensor["num_nonzero"], at)
                found.append(array)
                at += array.nbytes
            row_gaps, column_gaps, values = found
            weight = weights[tensor["name"]]
            positions = np.cumsum(row_gaps, dtype=np.int64) * _columns(weight.shape)
            positions += _columns_of(row_gaps, column_gaps)
            weight.reshape(-1)[positions] = values


def _columns_of(row_gaps: NDArray[Any], column_gaps: NDArray[Any]) -> NDArray[np.int64]:
    """Running sums of ``column_gaps`` that restart at each row."""
    sums = np.cumsum(column_gaps, dtype=np.int64)
    opens = np.flatnonzero(row_gaps)
    before = np.zeros(sums.size, np.int64)
    before[opens] = sums[opens] - column_gaps[opens]
    return sums - np.maximum.accumulate(before)


def _columns(shape: tuple[int, ...]) -> int:
    """The columns of a tensor seen as a matrix; a vector is one row."""
    return max(int(np.prod(shape[1:], dtype=np.int64)) if len(shape) > 1 else int(shape[-1]), 1)


def _narrow(gaps: NDArray[np.int64]) -> tuple[str, NDArray[Any]]:
    largest = int(gaps.max())
    for name, dtype in _WIDTHS.items():
        if largest <= np.iinfo(dtype).max:
            return name, gaps.astype(dtype)
    raise ValueError(f"a gap of {largest} does not fit the format")

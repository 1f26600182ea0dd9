"""Reads tensors from safetensors files in parts, never mapped into memory.

If another process truncates a mapped file, a signal kills the reader; a short read is an error that
can be reported.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltawire import codec
from deltawire.codec import Bits
from deltawire.errors import InputError
from deltawire.sync.publish.lazy_tensor import LazyTensor
from deltawire.wire.run import TensorSpec

MAX_HEADER_BYTES = 100 << 20


class CheckpointDirError(InputError):
    """A directory cannot be published; the run and other directories are not affected."""


@dataclass(frozen=True)
class StoredTensor(LazyTensor):
    """The location of one tensor in a file: ``offset`` is that of its first byte."""

    spec: TensorSpec
    path: Path
    offset: int

    def read_into(self, target: Bits, start: int = 0) -> None:
        """Fills ``target`` with elements from ``start`` on.

        Raises `CheckpointDirError` if the file ends before the elements do.
        """
        view = target.data.cast("B") if target.size else memoryview(b"")
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.offset + start * target.itemsize)
                while view:
                    count = file.readinto(view)
                    if not count:
                        raise CheckpointDirError(
                            f"{self.path} was truncated while it was read",
                            hint="publish it again once it is complete",
                        )
                    view = view[count:]
        except OSError as error:
            raise CheckpointDirError(
                f"cannot read {self.path}: {error.strerror or error}",
                hint="is it still being written?",
            ) from error


def read_safetensors(directory: Path) -> dict[str, Bits]:
    """Reads the tensors of a directory of ``*.safetensors`` files into memory.

    Tensors are returned as unsigned bits in their shapes; `safetensors_table` gives their dtypes.
    Raises `InputError` for a directory that has none, a name in two files, or a damaged file.
    """
    found = safetensors_of(directory)
    return {tensor.spec.name: tensor.read().reshape(tensor.shape) for tensor in found}


def safetensors_table(directory: Path) -> list[TensorSpec]:
    """Returns the tensor table of a directory of ``*.safetensors`` files, in name order.

    Raises as `read_safetensors` does.
    """
    found = safetensors_of(directory)
    return sorted((tensor.spec for tensor in found), key=lambda spec: spec.name)


def safetensors_of(directory: Path) -> list[StoredTensor]:
    """Finds the tensors of a directory of ``*.safetensors`` files; raises as `read_safetensors`
    does.
    """
    return safetensors_in(_files_of(directory))


def safetensors_in(files: Sequence[Path]) -> list[StoredTensor]:
    """Finds the tensors in safetensors files of one directory; raises as `read_safetensors`
    does.
    """
    found = [tensor for path in files for tensor in _tensors_of(path)]
    seen: set[str] = set()
    for tensor in found:
        if tensor.spec.name in seen:
            raise InputError(f"{files[0].parent} holds tensor {tensor.spec.name[:80]!r} twice")
        seen.add(tensor.spec.name)
    return found


def _files_of(directory: Path) -> list[Path]:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise InputError(f"there are no safetensors files in {directory}")
    return files


def _tensors_of(path: Path) -> list[StoredTensor]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(MAX_HEADER_BYTES, size - 8):
                raise ValueError("its header is longer than allowed")
            header = json.loads(file.read(length))
        first = 8 + length
        return [
            _tensor(path, name, entry, first, size - first)
            for name, entry in header.items()
            if name != "__metadata__"
        ]
    except (
        OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError,
        RecursionError,
    ) as error:  # fmt: skip
        raise InputError(f"{path} is not a safetensors file: {error}") from error


def _tensor(path: Path, name: str, entry: Any, first: int, available: int) -> StoredTensor:
    name.encode()  # Raises ValueError for a lone surrogate, which no object can store.
    begin, end = (int(offset) for offset in entry["data_offsets"])
    if entry["dtype"] not in codec.ITEMSIZE:
        raise ValueError(f"tensor {name[:80]!r} has the unknown dtype {entry['dtype']!r:.40}")
    shape = tuple(entry["shape"])
    if not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError(f"tensor {name[:80]!r} has the shape {entry['shape']!r:.60}")
    spec = TensorSpec(name, shape, entry["dtype"])
    size = spec.count * codec.ITEMSIZE[spec.dtype]
    if not 0 <= begin <= end <= available or end - begin != size:
        raise ValueError(f"tensor {name[:80]!r} is not where its header says")
    return StoredTensor(spec, path, first + begin)

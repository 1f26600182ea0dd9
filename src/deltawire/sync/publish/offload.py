"""Keeps a publisher's copies of the weights in files without a name, for hosts short of memory.

A publisher holds two copies of what it publishes: the newest version, and the staging buffers of
the next one. Offloaded, both lie in mapped files on a local disk, of which at most `RESIDENT_BYTES`
each, and the chunks in use, are mapped in at a time::

    trainer's weights ── copy ──▶ staging file ──┐
                                                 ├─ chunk by chunk ──▶ encode, digest ──▶ bucket
                                  version file ──┘

The files are open but have no name, so the system deletes them when the process ends, however it
ends. Their space is reserved when they are made: a disk that is full later cannot stop a version.
"""

from __future__ import annotations

import mmap
import shutil
import tempfile
import threading
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from deltawire import codec
from deltawire.errors import InputError
from deltawire.sync.follow.mirror import Bits, Elements, Mirror, select, starts_of
from deltawire.sync.follow.mirror_file import reserve
from deltawire.wire.run import Run, TensorSpec

COPIES = 2
"""Files of a publisher, each with the size of what it publishes."""

RESIDENT_BYTES = 256 << 20
"""Bytes of one file that may be read or written before its pages are given back to the system."""

ALIGN = 64

_COPIED = 1 << 22
"""Elements that are copied at a time from one file to another."""


class OffloadedMirror(Mirror):
    """A mirror in a mapped file without a name, in ``folder``; holds no version yet.

    Raises `InputError` if the folder is missing or cannot be written to, or the disk is too full.

    Example::

        mirror = offloaded_mirror(run, "/mnt/nvme")
        load_mirror(bucket, run, into=mirror)
        mirror.close()
    """

    def __init__(self, sizes: Mapping[str, tuple[int, Any]], folder: Path) -> None:
        """``sizes`` gives the number of elements and the dtype of each tensor."""
        self.folder = folder
        offsets, size = {}, 0
        for name, (count, dtype) in sizes.items():
            offsets[name] = size
            size += -(-count * dtype.itemsize // ALIGN) * ALIGN
        self._map = _mapped(folder, max(size, 1))
        tensors = {
            name: np.ndarray(count, dtype, self._map, offsets[name])
            for name, (count, dtype) in sizes.items()
        }
        super().__init__(tensors, -1, codec.ZERO)
        self._touched = 0
        self._counting = threading.Lock()

    def copy(self, *, shared: Container[str] = ()) -> OffloadedMirror:
        """Returns a mirror with a copy of the content in another file, which shares nothing."""
        del shared
        made = OffloadedMirror(
            {name: (bits.size, bits.dtype) for name, bits in self.tensors.items()}, self.folder
        )
        made.version, made.digest, made.held = self.version, self.digest, self.held
        made.starts = dict(self.starts)
        if self.version < 0:  # Both are zeros.
            return made
        for name, bits in self.tensors.items():
            for at in range(0, bits.size, _COPIED):
                part = bits[at : at + _COPIED]
                made.tensors[name][at : at + _COPIED] = part
                self.touched(part.nbytes)
                made.touched(part.nbytes)
        return made

    def fresh(self, run: Run) -> Mirror:
        """Does what `Mirror.fresh` does, in a file of the same folder."""
        return offloaded_mirror(run, self.folder)

    def narrow(self, ranges: Mapping[str, tuple[int, int]]) -> None:
        """Keeps of each tensor only a range of elements, (first, count), that is held."""
        kept = {}
        for name, (start, count) in ranges.items():
            bits = self.find(name, start, count)
            assert bits is not None
            kept[name] = bits
        self.tensors = kept
        self.starts = {name: start for name, (start, _) in ranges.items() if start}
        self.held = None

    def find(self, name: str, start: int, count: int) -> Bits | None:
        """Does what `Mirror.find` does, and counts the elements as read."""
        found = super().find(name, start, count)
        if found is not None:
            self.touched(found.nbytes)
        return found

    def clear(self) -> None:
        """Does nothing: a new file holds zeros."""

    def touched(self, size: int) -> None:
        """Gives back the pages in memory once `RESIDENT_BYTES` were read or written.

        Nothing is lost: the file has what was written, and another access maps it in again.
        """
        with self._counting:
            self._touched += size
            if self._touched < RESIDENT_BYTES:
                return
            self._touched = 0
        if hasattr(mmap, "MADV_DONTNEED"):
            with suppress(ValueError):  # It was closed.
                self._map.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Deletes the file; do not use the tensors afterwards."""
        self.tensors = {}
        with suppress(BufferError):  # A view is still in use; the file goes with it.
            self._map.close()


def offloaded_mirror(
    run: Run, folder: Path | str, wanted: Mapping[str, Any] | Iterable[str] | None = None
) -> OffloadedMirror:
    """Returns an empty mirror in a file in ``folder``; ``wanted`` as for `select`."""
    spans: dict[str, Elements] = select(run, wanted)
    dtypes = {spec.name: codec.unsigned_of(spec.dtype) for spec in run.tensors}
    sizes = {name: (span.stop - span.start, dtypes[name]) for name, span in spans.items()}
    made = OffloadedMirror(sizes, Path(folder))
    made.starts = starts_of(spans)
    return made


def require_room(folder: Path | str, specs: Iterable[TensorSpec]) -> None:
    """Raises `InputError` unless a publisher of these tensors can keep its copies in ``folder``."""
    size = sum(spec.count * codec.ITEMSIZE[spec.dtype] for spec in specs)
    _check_room(Path(folder), COPIES * size)
    _mapped(Path(folder), 1).close()


def _check_room(folder: Path, size: int) -> None:
    if not folder.is_dir():
        raise InputError(
            f"cannot offload the publisher's copies: there is no folder {folder}",
            hint="create it, or name another one in snapshot_dir",
        )
    free = shutil.disk_usage(folder).free
    if free < size:
        raise InputError(
            f"cannot offload the publisher's copies to {folder}: they need {size} bytes on that "
            f"disk, {free} are free",
            hint="free some space, or name a folder on a larger disk in snapshot_dir",
        )


def _mapped(folder: Path, size: int) -> mmap.mmap:
    """Returns a mapping of a new file of zeros that has no name, and whose space is reserved."""
    _check_room(folder, size)
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            reserve(file, size)
            return mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise InputError(
            f"cannot offload the publisher's copies to {folder}: {error.strerror or error}",
            hint="name a writable folder in snapshot_dir, on a disk with room for the model "
            f"{COPIES} times",
        ) from error

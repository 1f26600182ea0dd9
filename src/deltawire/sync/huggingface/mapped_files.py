"""Maps the safetensors files of a directory as a mirror, and computes their digest."""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from deltawire import codec
from deltawire.codec import Digest
from deltawire.errors import CorruptError
from deltawire.sync.follow.mirror import Bits, Mirror, PiecePatch
from deltawire.sync.huggingface.safetensors_layout import FilePlan
from deltawire.wire.run import Run

READ_BYTES = 16 << 20
"""Files are read in parts of this many bytes: a truncated file is then an error, not a signal."""


class MappedMirror(Mirror):
    """A mirror in mapped files that remembers what was written to it."""

    changed_bytes = 0
    _changed: frozenset[str] = frozenset()
    _loaded = False

    def move(
        self, pieces: Sequence[PiecePatch], version: int, digest: Digest, held: Digest | None
    ) -> None:
        """As `Mirror.move`."""
        loaded = self._loaded
        super().move(pieces, version, digest, held)
        self._loaded = loaded
        self._changed |= {piece.name for piece in pieces}
        for piece in pieces:
            width = self.tensors[piece.name].itemsize
            pages = (piece.positions.astype(np.int64) + piece.start) * width // mmap.PAGESIZE
            self.changed_bytes += len(np.unique(pages)) * mmap.PAGESIZE

    def begin(self) -> None:
        """As `Mirror.begin`."""
        super().begin()
        self._loaded = True

    def may_have_changed(self, plan: FilePlan) -> bool:
        """Returns whether a tensor of a file was written to since its files were mapped."""
        return self._loaded or not self._changed.isdisjoint(span.stored for span in plan.spans)


def made(folder: Path, plans: list[FilePlan]) -> bool:
    """Returns whether a folder holds the planned safetensors files, by their sizes and headers."""
    try:
        for plan in plans:
            with (folder / plan.name).open("rb") as file:
                if file.read(len(plan.prefix)) != plan.prefix:
                    return False
                if os.fstat(file.fileno()).st_size != plan.bytes:
                    return False
    except OSError:
        return False
    return True


@contextmanager
def mapped(
    folder: Path,
    plans: list[FilePlan],
    run: Run,
    *,
    writable: bool = True,
    private: Collection[str] = (),
) -> Iterator[MappedMirror]:
    """Maps the safetensors files of a folder as a mirror that holds no version. Changes to those
    named in ``private`` stay in memory.

    On exit, writes what could not be a view (an unaligned tensor, the second name of a tied one),
    and flushes everything to the disk.
    """
    specs = {spec.name: spec for spec in run.tensors}
    tensors: dict[str, Bits] = {}
    later: list[tuple[Bits, str]] = []
    maps: list[mmap.mmap] = []
    access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
    for plan in plans:
        own = plan.name in private
        with (folder / plan.name).open("r+b" if writable and not own else "rb") as file:
            memory = mmap.mmap(
                file.fileno(), plan.bytes, access=mmap.ACCESS_COPY if own else access
            )
        maps.append(memory)
        raw = np.frombuffer(memory, np.uint8)
        for span in plan.spans:
            dtype = codec.unsigned_of(specs[span.stored].dtype)
            part = raw[span.begin : span.end]
            aligned = span.begin % dtype.itemsize == 0
            if span.stored not in tensors and aligned:
                tensors[span.stored] = part.view(dtype)
                continue
            if span.stored not in tensors:
                tensors[span.stored] = np.frombuffer(part.tobytes(), dtype).copy()
            later.append((part, span.stored))
    mirror = MappedMirror({spec.name: tensors[spec.name] for spec in run.tensors}, -1, Digest(0, 0))
    try:
        yield mirror
        if writable:
            for part, stored in later:
                part[:] = tensors[stored].view(np.uint8)
            for memory in maps:
                memory.flush()
    finally:
        mirror.tensors = {}
        tensors.clear()
        later.clear()
        for memory in maps:
            with suppress(BufferError):  # An error in flight may still hold a view.
                memory.close()
    for plan in plans if writable else ():
        if plan.name in private:
            continue
        with (folder / plan.name).open("rb") as file:
            os.fsync(file.fileno())


def digest_files(folder: Path, plans: list[FilePlan], run: Run) -> Digest:
    """Computes the model's digest from its files; names of tied tensors must hold the same bits.

    Raises `CorruptError` if they do not, or a file is shorter than planned.
    """
    specs = {spec.name: spec for spec in run.tensors}
    digests: dict[str, Digest] = {}
    for plan in plans:
        with (folder / plan.name).open("rb") as file:
            for span in plan.spans:
                dtype = codec.unsigned_of(specs[span.stored].dtype)
                file.seek(span.begin)
                found, at = codec.ZERO, 0
                for begin in range(span.begin, span.end, READ_BYTES):
                    data = file.read(min(READ_BYTES, span.end - begin))
                    if len(data) != min(READ_BYTES, span.end - begin):
                        raise CorruptError(f"{folder / plan.name} was truncated")
                    bits = np.frombuffer(data, dtype)
                    found += codec.digest_bits(span.stored, bits, at)
                    at += bits.size
                if digests.setdefault(span.stored, found) != found:
                    raise CorruptError(f"{span.name[:80]!r} differs from the tensor it is tied to")
    return sum(digests.values(), codec.ZERO)

"""Keeps a mirror in a file, so that a restarted process can continue from it.

| bytes | content |
|---|---|
| 8 | magic ``DWMIRR01`` |
| 16 | the run's id |
| 32 | BLAKE3 of the names, dtypes and ranges of the tensors that are held |
| 8 | sequence: odd while the data is being changed |
| 8 | version, signed; −1 for none |
| 16, 16 | digest of the model, digest of the elements that are held |
| 16 | first half of the BLAKE3 of the three before |
| … | zeros up to byte 4096, then the tensors in the order of the table, each at a multiple of 64 |

Integers are little-endian. The writer raises the sequence to an odd number before it changes
anything, and to the next even one when everything is written, so a process that dies in between
leaves an odd number. A restarted process trusts none of this: it uses the content only if the
digest of the data, computed in one pass over it, is the stated one. Pages lost in a power failure
are found by the same pass.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
from blake3 import blake3

from deltawire import codec
from deltawire.codec import Digest
from deltawire.errors import InputError
from deltawire.private_files import open_private
from deltawire.sync.follow.mirror import Bits, Elements, Mirror, select, starts_of
from deltawire.wire.run import Run

MAGIC = b"DWMIRR01"
DATA_AT = 4096
ALIGN = 64

_IDENTITY = struct.Struct("<8s16s32s")
_SEQUENCE = struct.Struct("<Q")
_STATE = struct.Struct("<q4Q16s")
_STATE_AT = _IDENTITY.size + _SEQUENCE.size

Wanted = Mapping[str, tuple[int, int] | None] | Iterable[str] | None


class FileMirror(Mirror):
    """A mirror whose memory is a file that only this process writes to.

    Example::

        with closing(open_mirror("weights.mirror", run)) as mirror:
            load_mirror(bucket, run, into=mirror, resume=True)
    """

    def __init__(self, path: Path, run: Run, spans: Mapping[str, Elements]) -> None:
        """Opens or creates the file. If the file holds an undamaged version of the same run and
        tensors, so does the mirror; otherwise it holds none and ``version`` is -1.

        Raises `InputError` if another process writes to the file, or the disk has no room for it.
        """
        self.path = path
        offsets, size = _layout(run, spans)
        identity = _identity(run, spans)
        file: IO[bytes] | None = None
        try:
            file = self._file = open_locked(path)
            fresh = self._file.read(_IDENTITY.size) != identity
            reserve(self._file, size)
            self._map = mmap.mmap(self._file.fileno(), size)
        except OSError as error:
            if file is not None:
                file.close()
            raise InputError(
                f"cannot store a mirror in {path}: {error.strerror or error}",
                hint="choose a folder with room for the model, or stop the other process",
            ) from error
        super().__init__(_views(self._map, run, spans, offsets), -1, codec.ZERO, starts_of(spans))
        if fresh:
            self._map[:DATA_AT] = identity.ljust(DATA_AT, b"\0")
            self._write_state(1, -1, codec.ZERO, codec.ZERO)
            return
        sequence, version, digest, held = _read_state(self._map)
        if sequence % 2 == 0 and version >= 0 and _whole(self._map) and self.compute_held() == held:
            self.version, self.digest, self.held = version, digest, held
        else:
            self._write_state(sequence | 1, -1, codec.ZERO, codec.ZERO)

    def begin(self) -> None:
        """Does what `Mirror.begin` does, in the file too."""
        super().begin()
        self._write_state(_read_state(self._map)[0] | 1, -1, codec.ZERO, codec.ZERO)

    def finish(self, version: int, digest: Digest, held: Digest | None) -> None:
        """Does what `Mirror.finish` does, in the file too."""
        super().finish(version, digest, held)
        sequence = _read_state(self._map)[0] | 1
        self._write_state(sequence, version, digest, held or digest)
        # Write the even number last: if it is on the disk, so is everything else.
        _SEQUENCE.pack_into(self._map, _IDENTITY.size, sequence + 1)

    def flush(self) -> None:
        """Writes everything to the disk, so that it survives a power failure."""
        self._map.flush()

    def close(self) -> None:
        """Closes the file but does not delete it; do not use the tensors afterwards."""
        self.tensors = {}
        with suppress(BufferError):  # A view is still in use; the map closes with it.
            self._map.close()
        self._file.close()

    def _write_state(self, sequence: int, version: int, digest: Digest, held: Digest) -> None:
        _SEQUENCE.pack_into(self._map, _IDENTITY.size, sequence)
        lanes = (digest.lane0, digest.lane1, held.lane0, held.lane1)
        _STATE.pack_into(self._map, _STATE_AT, version, *lanes, _check(version, *lanes))


def open_mirror(path: Path | str, run: Run, wanted: Wanted = None) -> FileMirror:
    """Opens the mirror in a file (see `FileMirror`); ``wanted`` as for `select`.

    Fill it or move it forward with ``load_mirror(…, into=mirror)`` or a `Subscriber`.
    """
    return FileMirror(Path(path), run, select(run, wanted))


def open_locked(path: Path) -> IO[bytes]:
    """Opens or creates a file, locked for one process.

    Raises `OSError`, and `InputError` for a link or a file that other users own or may write to.
    """
    descriptor = open_private(path, os.O_RDWR | os.O_CREAT)
    file = os.fdopen(descriptor, "r+b", buffering=0)
    try:
        import fcntl
    except ImportError:  # This system has no such locks: the user must not start two writers.
        return file
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file


def reserve(file: IO[bytes], size: int) -> None:
    """Reserves disk space now: a full disk met later would kill the process during a write."""
    file.truncate(size)
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)


def _layout(run: Run, spans: Mapping[str, Elements]) -> tuple[dict[str, int], int]:
    offsets, at = {}, DATA_AT
    for spec in run.tensors:
        if spec.name in spans:
            offsets[spec.name] = at
            span = spans[spec.name]
            length = (span.stop - span.start) * codec.ITEMSIZE[spec.dtype]
            at += -(-length // ALIGN) * ALIGN
    return offsets, at


def _identity(run: Run, spans: Mapping[str, Elements]) -> bytes:
    table = [(s.name, s.dtype, *spans[s.name]) for s in run.tensors if s.name in spans]
    layout = blake3(msgspec.json.encode(table)).digest()
    return _IDENTITY.pack(MAGIC, bytes.fromhex(run.id), layout)


def _views(
    memory: Any, run: Run, spans: Mapping[str, Elements], offsets: Mapping[str, int]
) -> dict[str, Bits]:
    return {
        spec.name: np.ndarray(
            spans[spec.name].stop - spans[spec.name].start,
            codec.unsigned_of(spec.dtype),
            memory,
            offsets[spec.name],
        )
        for spec in run.tensors
        if spec.name in spans and spans[spec.name].stop > spans[spec.name].start
    } | {
        spec.name: np.empty(0, codec.unsigned_of(spec.dtype))
        for spec in run.tensors
        if spec.name in spans and spans[spec.name].stop == spans[spec.name].start
    }


def _check(version: int, *lanes: int) -> bytes:
    return blake3(_STATE.pack(version, *lanes, b"")).digest(16)


def _whole(memory: Any) -> bool:
    *state, check = _STATE.unpack_from(memory, _STATE_AT)
    return bool(check == _check(*state))


def _read_state(memory: Any) -> tuple[int, int, Digest, Digest]:
    (sequence,) = _SEQUENCE.unpack_from(memory, _IDENTITY.size)
    version, *lanes, _ = _STATE.unpack_from(memory, _STATE_AT)
    return sequence, version, Digest(*lanes[:2]), Digest(*lanes[2:])

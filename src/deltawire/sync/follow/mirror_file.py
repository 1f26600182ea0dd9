"""A mirror in a file: taken up again after a restart, or shared by the processes of a node.

| bytes | what |
|---|---|
| 8 | magic ``DWMIRR01`` |
| 16 | the run's id |
| 32 | BLAKE3 of which tensors are held, of which dtype, from where to where |
| 8 | sequence: odd while the data is being changed |
| 8 | version, signed; −1 for none |
| 16, 16 | digest of the model, digest of what is held |
| 16 | first half of the BLAKE3 of the three before |
| … | zeros up to byte 4096, then the tensors in the order of the table, each at a multiple of 64 |

Integers are little-endian. The writer raises the sequence to an odd number before it changes
anything, and to the next even one when everything is there; so a process that dies in between
leaves an odd number, and readers of the same file see that what they read was changing. A restarted
process trusts none of this: it takes the file up only if the digest of the data, by one pass over
it, is the one that is stated. A lost page of a machine that lost power is found by the same pass.

In ``/dev/shm`` the file is the shared memory of a node: one process moves it, the others attach.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
from blake3 import blake3

from deltawire import codec
from deltawire.codec import Digest
from deltawire.errors import InputError, RetryError
from deltawire.sync.follow.mirror import Bits, Mirror, Span, select, starts_of
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
    """A mirror whose memory is a file that this process alone writes to."""

    def __init__(self, path: Path, run: Run, spans: Mapping[str, Span]) -> None:
        """Open or make the file. It holds a version if it held one of the same run and tensors
        before, and every bit of it is still there; else none, at ``version`` -1.

        Raises `InputError` if another process writes to it, or there is no room for it.
        """
        self.path = path
        offsets, size = _layout(run, spans)
        identity = _identity(run, spans)
        file: IO[bytes] | None = None
        try:
            file = self._file = open_locked(path)
            fresh = self._file.read(_IDENTITY.size) != identity
            _reserve(self._file, size)
            self._map = mmap.mmap(self._file.fileno(), size)
        except OSError as error:
            if file is not None:
                file.close()
            raise InputError(
                f"cannot keep a mirror in {path}: {error.strerror or error}",
                hint="choose a folder with room for the model, or end the other process",
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
        """As `Mirror.begin`, for everybody who looks at the file."""
        super().begin()
        self._write_state(_read_state(self._map)[0] | 1, -1, codec.ZERO, codec.ZERO)

    def finish(self, version: int, digest: Digest, held: Digest | None) -> None:
        """As `Mirror.finish`, for everybody who looks at the file."""
        super().finish(version, digest, held)
        sequence = _read_state(self._map)[0] | 1
        self._write_state(sequence, version, digest, held or digest)
        # The even number last: whoever sees it must see the rest.
        _SEQUENCE.pack_into(self._map, _IDENTITY.size, sequence + 1)

    def flush(self) -> None:
        """Write everything to the disk, so that it outlives the machine's power as well."""
        self._map.flush()

    def close(self) -> None:
        """Let go of the file, which stays; the tensors must not be used any more."""
        self.tensors = {}
        with suppress(BufferError):  # Somebody still holds a view: it ends with that.
            self._map.close()
        self._file.close()

    def _write_state(self, sequence: int, version: int, digest: Digest, held: Digest) -> None:
        _SEQUENCE.pack_into(self._map, _IDENTITY.size, sequence)
        lanes = (digest.lane0, digest.lane1, held.lane0, held.lane1)
        _STATE.pack_into(self._map, _STATE_AT, version, *lanes, _check(version, *lanes))


class AttachedMirror:
    """Another process's mirror, to be read. ``tensors`` are views of its memory, not writable.

    What they hold changes when that process moves on. To take a consistent copy::

        while True:
            sequence, version, digest = attached.state()
            … copy out of attached.tensors …
            if attached.unchanged(sequence):
                break
    """

    def __init__(self, path: Path, run: Run, wanted: Wanted = None) -> None:
        """Raises `InputError` if the file is not a mirror of the same tensors of the same run."""
        spans = select(run, wanted)
        offsets, size = _layout(run, spans)
        try:
            with path.open("rb") as file:
                fits = file.read(_IDENTITY.size) == _identity(run, spans)
                fits = fits and os.fstat(file.fileno()).st_size == size
                self._map = (
                    mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if fits else None
                )
        except OSError as error:
            raise InputError(f"cannot read the mirror {path}: {error.strerror}") from error
        if self._map is None:
            raise InputError(
                f"{path} is no mirror of these tensors of this run",
                hint="attach with the same wanted tensors that the writer has",
            )
        self.tensors = _views(self._map, run, spans, offsets)
        self.starts = starts_of(spans)

    def state(self) -> tuple[int, int, Digest]:
        """Sequence, version and digest; raises `RetryError` while the writer changes them."""
        sequence, version, digest, _ = _read_state(self._map)
        settled = sequence % 2 == 0 and version >= 0 and _whole(self._map)
        if not settled or not self.unchanged(sequence):
            raise RetryError("the mirror is being changed", hint="look again")
        return sequence, version, digest

    def unchanged(self, sequence: int) -> bool:
        """Whether nothing has changed since `state` gave ``sequence``."""
        return _read_state(self._map)[0] == sequence


def open_mirror(path: Path | str, run: Run, wanted: Wanted = None) -> FileMirror:
    """The mirror in a file (see `FileMirror`); ``wanted`` as for `select`.

    Fill it or move it on with ``load_mirror(…, into=mirror)`` or a `Subscriber`.
    """
    return FileMirror(Path(path), run, select(run, wanted))


def shared_path(name: str) -> Path:
    """Where a mirror that the processes of this node share lies: in memory, where there is
    ``/dev/shm``, else in the folder for temporary files."""
    memory = Path("/dev/shm")  # noqa: S108 - a file of a name the caller chose, opened with a lock
    folder = memory if memory.is_dir() else Path(tempfile.gettempdir())
    if not name or Path(name).name != name or name == "..":
        raise InputError(f"{name[:80]!r} is not a file's name")
    return folder / name


def open_locked(path: Path) -> IO[bytes]:
    """Open a file, or make it, that no other process may open so; raises `OSError`."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
    file = os.fdopen(descriptor, "r+b", buffering=0)
    try:
        import fcntl
    except ImportError:  # No such locks here: two writers are then the user's own affair.
        return file
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file


def _reserve(file: IO[bytes], size: int) -> None:
    """Take the room now: a full disk found later would end the process in mid-write."""
    file.truncate(size)
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)


def _layout(run: Run, spans: Mapping[str, Span]) -> tuple[dict[str, int], int]:
    offsets, at = {}, DATA_AT
    for spec in run.tensors:
        if spec.name in spans:
            offsets[spec.name] = at
            span = spans[spec.name]
            length = (span.stop - span.start) * codec.ITEMSIZE[spec.dtype]
            at += -(-length // ALIGN) * ALIGN
    return offsets, at


def _identity(run: Run, spans: Mapping[str, Span]) -> bytes:
    table = [(s.name, s.dtype, *spans[s.name]) for s in run.tensors if s.name in spans]
    layout = blake3(msgspec.json.encode(table)).digest()
    return _IDENTITY.pack(MAGIC, bytes.fromhex(run.id), layout)


def _views(
    memory: Any, run: Run, spans: Mapping[str, Span], offsets: Mapping[str, int]
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

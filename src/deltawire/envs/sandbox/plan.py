"""Requests to the launcher and its results: one frame in each direction, over its pipes.

A frame is the length of a JSON header (8 bytes, little-endian), the header, and then the contents
of the files that the header lists, in order. Only the standard library: the launcher imports this.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

MAX_HEADER_BYTES = 16 << 20
MAX_PATH = 512
MAX_DEPTH = 32
PACKAGES = "/packages"

Files = Mapping[str, bytes]
"""A folder as a value: regular files by relative path, with ``/`` between names; without modes,
links or empty folders."""


@dataclass(frozen=True)
class CommandLimits:
    """The limits of one command, for all its processes together unless stated otherwise.

    ``memory_bytes`` bounds the address space of each process by the kernel, and the resident sum by
    a check every `launcher.CHECK_S`; ``cpu_s`` likewise. Files count under ``disk_bytes`` instead.
    The command is tied to ``cores`` processors. Of its output, ``output_bytes`` are kept, half from
    the start and half from the end; a command that prints `PRINTED_TIMES` as much is ended.
    """

    wall_s: float = 20.0
    cpu_s: float = 20.0
    cores: int = 1
    memory_bytes: int = 512 << 20
    processes: int = 32
    open_files: int = 128
    disk_bytes: int = 32 << 20
    files: int = 2000
    output_bytes: int = 64 << 10


PRINTED_TIMES = 256


@dataclass(frozen=True)
class Request:
    """One command over one folder.

    ``isolation`` is ``namespaces`` or ``process``; ``uid`` is the user that a command becomes if
    the launcher is root, None to stay. With ``read_only``, no folder can be written. Folders of
    packages in ``shown`` appear below `PACKAGES`. An ``interactive`` command talks over the
    launcher's own stdin and stdout, and its folder is not read afterwards.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    limits: CommandLimits
    isolation: str
    user_namespace: bool
    uid: int | None
    python: str
    prefix: str
    read_only: bool = False
    shown: tuple[str, ...] = ()
    interactive: bool = False


@dataclass(frozen=True)
class Result:
    """The result of a command.

    ``status`` is its exit code, or minus the signal that ended it; ``cause`` names the limit that
    it exceeded (time, cpu, memory, processes, output), or is empty. ``lost`` counts entries that
    `Files` cannot hold, or that are beyond the limits. ``fault`` is the reason if it was never
    started, and ``unsupported`` says that this machine cannot start it.
    """

    status: int = 0
    cause: str = ""
    seconds: float = 0.0
    printed: int = 0
    lost: int = 0
    fault: str = ""
    unsupported: bool = False


def valid_path(path: str) -> bool:
    """Returns whether a path is relative, printable, and stays below its start."""
    names = path.split("/")
    return (
        0 < len(path.encode(errors="replace")) <= MAX_PATH
        and len(names) <= MAX_DEPTH
        and path.isprintable()
        and not any(name in ("", ".", "..") or len(name.encode()) > 255 for name in names)
    )


def footprint(files: Files) -> tuple[int, int]:
    """Bytes and entries that a folder takes on disk: whole pages for each file, and the folders of
    its path."""
    size = sum(-(-len(data) // mmap.PAGESIZE) * mmap.PAGESIZE for data in files.values())
    folders = {
        path.rsplit("/", depth)[0] for path in files for depth in range(1, path.count("/") + 1)
    }
    return size, len(files) + len(folders)


def pack(header: Mapping[str, Any], parts: list[bytes]) -> bytes:
    """Packs a frame."""
    text = json.dumps(header).encode()
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def pack_request(request: Request, files: Files) -> bytes:
    """Packs the frame that starts a command; the caller has checked the paths."""
    table = [[path, len(data)] for path, data in files.items()]
    return pack({"request": asdict(request), "files": table}, list(files.values()))


def read_header(read: Callable[[int], bytes]) -> dict[str, Any]:
    """Reads the header of the next frame; raises `ValueError` if it is invalid."""
    length = int.from_bytes(read(8), "little")
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {length} bytes")
    header = json.loads(read(length))
    if not isinstance(header, dict):
        raise ValueError("a header that is not an object")  # noqa: TRY004
    return header


def request_of(header: Mapping[str, Any]) -> Request:
    """The request that a header holds."""
    raw = dict(header["request"])
    raw["limits"] = CommandLimits(**raw["limits"])
    raw["command"], raw["shown"] = tuple(raw["command"]), tuple(raw["shown"])
    return Request(**raw)


def read_exactly(count: int) -> bytes:
    """Reads ``count`` bytes of stdin; raises `EOFError` if it ends before."""
    parts, have = [], 0
    while have < count:
        part = os.read(0, min(count - have, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        have += len(part)
    return b"".join(parts)

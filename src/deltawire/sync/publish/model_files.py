"""Reads the files of a Hugging Face directory, other than weights, that a run carries.

Carries regular files with the suffixes below whose names are one word; not pickles, code, trainer
states or subfolders.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection
from pathlib import Path

from deltawire.errors import InputError
from deltawire.private_files import open_beneath

LAYOUT = "safetensors.layout.json"
"""The name of the model file that holds a layout. No file of a directory may have it."""

INDEX = "model.safetensors.index.json"
MAX_FILE_BYTES = 256 << 20
SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".md")
LEFT_OUT = ("trainer_state.json", LAYOUT)

_NAME = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\Z")
_DEVICE = re.compile(r"(CON|PRN|AUX|NUL|COM[0-9]|LPT[0-9])\Z")


def portable_name(name: str) -> bool:
    """Returns whether ``name`` is one word that every system accepts as a file name.

    Device names of Windows, such as ``con.json``, are not accepted.
    """
    stem = name.partition(".")[0].upper()
    return bool(_NAME.match(name)) and not name.endswith(".") and not _DEVICE.match(stem)


def may_be_carried(name: str) -> bool:
    """Returns whether a run may carry a file of this name."""
    return portable_name(name) and name.endswith(SUFFIXES) and name not in LEFT_OUT


def other_files(path: Path, weights: Collection[str]) -> tuple[dict[str, bytes], list[str]]:
    """Reads the carried files of a directory by name, and lists what is left out.

    ``weights`` are the names of its weight files. Raises `InputError` for a file that is too large,
    whose name differs from another one in case only, or that is a link out of the directory.
    """
    files: dict[str, bytes] = {}
    left_out: list[str] = []
    taken = {name.casefold() for name in weights}
    for file in sorted(path.iterdir()):
        if file.name in weights:
            continue
        if not file.is_file() or not may_be_carried(file.name):
            left_out.append(file.name)
            continue
        if file.name.casefold() in taken:
            raise InputError(f"{file}: another name differs only in case")
        taken.add(file.name.casefold())
        files[file.name] = _read(path, file)
    return files, left_out


def _read(folder: Path, file: Path) -> bytes:
    """Reads a file of ``folder``; of links only those to files below it, or of a snapshot of the
    Hugging Face cache, whose files are links to ``blobs``. Raises `InputError`."""
    roots = [folder.resolve()]
    if folder.parent.name == "snapshots":
        roots.append((folder.parent.parent / "blobs").resolve())
    real = file.resolve() if file.is_symlink() else roots[0] / file.name
    root = next((one for one in roots if real.is_relative_to(one)), None)
    if root is None:
        raise InputError(
            f"{file} is a link to a file outside of its directory, which is not published",
            hint="remove it, or put a copy of the file in its place",
        )
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        descriptor = open_beneath(root, real.relative_to(root).parts, flags)
        with os.fdopen(descriptor, "rb") as opened:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise InputError(f"{file} is not a regular file")
            data = opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror or error}") from error
    if len(data) > MAX_FILE_BYTES:
        raise InputError(f"{file} exceeds {MAX_FILE_BYTES} bytes")
    return data

"""Files and folders that no other user of this machine may have prepared or may change.

Staging folders, caches and shared-memory mirrors lie where other users can create names too, such
as ``/dev/shm`` or a shared disk. Whoever creates the name first chooses what lies there: a link to
a file of the victim, or a file that the other user can still write. So links of other users are not
followed, and owner and mode are checked on the open file, not on its name.

Works where files have owners and modes (Linux, macOS); elsewhere nothing is checked.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path

from deltawire.errors import InputError

WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_HAS_OWNERS = hasattr(os, "geteuid")
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_CLOEXEC = getattr(os, "O_CLOEXEC", 0)
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)
"""So that a pipe in the place of the file does not hang its reader."""


class OtherUsersError(InputError):
    """A file or folder belongs to another user of this machine: this one can do without it."""


def open_beneath(folder: Path, parts: Sequence[str], flags: int) -> int:
    """Opens a file of a folder as `os.open` does, without following a link below ``folder``, also
    if another process puts one in the way meanwhile.

    ``parts`` is the path below the folder. Returns the file descriptor. Raises `OSError`; for a
    link its ``errno`` is ``ELOOP``, or ``ENOTDIR`` if it stands for a folder.
    """
    if os.open not in os.supports_dir_fd or not _NOFOLLOW:
        return os.open(folder.joinpath(*parts), flags)
    inner = os.O_RDONLY | os.O_DIRECTORY | _CLOEXEC
    descriptor = os.open(folder, inner)
    try:
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            chosen = flags | _NOFOLLOW | _CLOEXEC if last else inner | _NOFOLLOW
            opened = os.open(part, chosen, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = opened
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def private_folder(path: Path, *, mode: int = 0o700) -> Path:
    """Create ``path`` with ``mode`` where it is missing, and check that only this user writes it.

    Returns ``path``. A folder that others are to read gets mode 0755. Raises `InputError` if it is
    a link or no folder, belongs to another user, or other users may write into it.

    Example::

        staging = private_folder(directory / ".staging")
    """
    try:
        path.mkdir(mode=mode, parents=True, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise InputError(f"cannot use the folder {path}: {error.strerror or error}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise InputError(
            f"{path} is not a folder, or a link to one",
            hint="another user may have made it: remove it, or choose another folder",
        )
    _check_owner(path, found)
    return path


def open_private(path: Path, flags: int, mode: int = 0o600) -> int:
    """Open a file as `os.open` does, but follow no link and accept no other user's file.

    Returns the file descriptor. Raises `InputError` if the name is a link, not a regular file,
    belongs to another user or may be written by others, or if the file has another name too and is
    opened for writing; and `OSError` as `os.open` does.
    """
    try:
        descriptor = os.open(path, flags | _NOFOLLOW | _CLOEXEC | _NONBLOCK, mode)
    except OSError as error:
        if path.is_symlink():
            raise InputError(
                f"{path} is a link, which is not followed",
                hint="another user may have made it: remove it",
            ) from error
        raise
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise InputError(f"{path} is not a regular file", hint="remove it")
        _check_owner(path, found)
        if flags & (os.O_WRONLY | os.O_RDWR) and found.st_nlink > 1:
            raise InputError(
                f"{path} is a second name of another file",
                hint="another user may have made it: remove it",
            )
        if _NONBLOCK and hasattr(os, "set_blocking"):
            os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_private(path: Path, limit: int) -> bytes | None:
    """Read a file of this user, at most ``limit`` bytes of it; None if there is none.

    Raises `InputError` as `open_private` does, or if the file cannot be read.
    """
    try:
        with os.fdopen(open_private(path, os.O_RDONLY), "rb") as file:
            return file.read(limit)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error


def replace_private(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Replace a file atomically with one of ``mode``, whatever the umask; raises `InputError`."""
    staged = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        descriptor = open_private(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fchmod(descriptor, mode)
                os.fsync(file.fileno())
            staged.replace(path)
        except OSError:
            staged.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error


def _check_owner(path: Path, found: os.stat_result) -> None:
    if not _HAS_OWNERS:
        return
    if found.st_uid != os.geteuid():
        raise OtherUsersError(
            f"{path} belongs to another user (id {found.st_uid})",
            hint="remove it, or choose another folder",
        )
    if found.st_mode & WRITABLE_BY_OTHERS:
        raise InputError(
            f"other users may write to {path} (mode {stat.S_IMODE(found.st_mode):o})",
            hint=f"check what it holds, then chmod go-w {path}",
        )

"""Starts a file as another file's content without writing it: by a reflink or a hard link."""

from __future__ import annotations

import errno
import os
from enum import Enum
from pathlib import Path

FICLONE = 0x40049409
"""The request of Linux that makes a file share another's blocks until either is written
(ioctl_ficlone(2)); Btrfs, XFS and others do it."""

_NOT_HERE = {
    errno.EOPNOTSUPP,
    errno.ENOTTY,
    errno.ENOSYS,
    errno.EXDEV,
    errno.EINVAL,
    errno.EPERM,
    errno.EACCES,
    errno.EMLINK,
    errno.ETXTBSY,
}
"""Errors of a file system that cannot share, or cannot share these files."""


class FileOrigin(Enum):
    """How a file of a new version began."""

    CLONED = "cloned"
    LINKED = "linked"
    COPIED = "copied"


def clone(source: Path, target: Path) -> bool:
    """Makes ``target``, which does not exist, share the blocks of ``source``; returns False if the
    file system cannot. Raises `OSError` for a full or broken disk.
    """
    with source.open("rb") as read, target.open("xb") as write:
        try:
            _ficlone(write.fileno(), read.fileno())
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise
            cloned = False
        else:
            cloned = True
    if not cloned:
        target.unlink()
    return cloned


def _ficlone(target: int, source: int) -> None:
    try:
        import fcntl
    except ImportError as error:  # Not Unix.
        raise OSError(errno.ENOSYS, "no ioctl here") from error
    fcntl.ioctl(target, FICLONE, source)


def link(source: Path, target: Path) -> bool:
    """Makes ``target`` another name of the file ``source``, which must never be written again;
    returns False if the file system cannot. Raises `OSError` for a full or broken disk.
    """
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NOT_HERE:
            raise
        return False
    return True

"""Identities of reports: remembers which report has which id, also after a restart."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from typing import Literal

from blake3 import blake3

from deltawire.private_files import open_private, read_private, replace_private

MAX_IDENTITIES = 1 << 20
_BYTES = 32
"""16 bytes of the id's hash, then 16 of the content's."""


class ReportIdentities:
    """The ids of the last `MAX_IDENTITIES` reports, in memory and in a file.

    An id that a crash kept out of the file is taken twice; readers of feedback count it once.
    """

    def __init__(self, path: Path, *, limit: int = MAX_IDENTITIES) -> None:
        self._path = path
        self._limit = limit
        self._known: OrderedDict[bytes, bytes] = OrderedDict()
        data = read_private(path, 4 * limit * _BYTES) or b""
        for at in range(0, len(data) - _BYTES + 1, _BYTES):
            self._known[data[at : at + 16]] = data[at + 16 : at + _BYTES]
        self._trim()
        replace_private(path, self._encoded())
        self._file = open_private(path, os.O_WRONLY | os.O_APPEND)
        self._appended = 0

    def check(self, name: str, content: bytes) -> Literal["new", "same", "other"]:
        """Returns whether a report with this id is new, the same as before, or another one."""
        known = self._known.get(_hash(name.encode()))
        if known is None:
            return "new"
        return "same" if known == _hash(content) else "other"

    def add(self, name: str, content: bytes) -> None:
        """Remembers a report in memory."""
        self._known[_hash(name.encode())] = _hash(content)
        self._trim()

    def discard(self, name: str) -> None:
        """Forgets a report that was not stored."""
        self._known.pop(_hash(name.encode()), None)

    def write(self, name: str) -> None:
        """Writes a report that was stored to the file."""
        key = _hash(name.encode())
        content = self._known.get(key)
        if content is None:
            return
        os.write(self._file, key + content)
        self._appended += 1
        if self._appended > self._limit:
            replace_private(self._path, self._encoded())
            os.close(self._file)
            self._file = open_private(self._path, os.O_WRONLY | os.O_APPEND)
            self._appended = 0

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)

    def _encoded(self) -> bytes:
        return b"".join(key + content for key, content in self._known.items())

    def _trim(self) -> None:
        while len(self._known) > self._limit:
            self._known.popitem(last=False)


def _hash(data: bytes) -> bytes:
    return blake3(data).digest(16)

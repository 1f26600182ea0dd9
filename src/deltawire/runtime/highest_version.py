"""Remembers, on this machine, the highest version and decision that were read of each pinned run.

A signature shows who wrote an object, not that it is the newest one: anyone who can write to the
bucket can delete the newest versions and show an older state with valid signatures. A reader that
remembers a newer version detects that.

There is one small file per run and bucket in ``$XDG_STATE_HOME/deltawire/versions/`` (by default
``~/.local/state``). A relay's destination lags its source, so each has its own file.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from blake3 import blake3

from deltawire.errors import InputError, SignatureError
from deltawire.private_files import open_private, private_folder, read_private, replace_private

try:
    import fcntl
except (
    ImportError
):  # Missing on some systems; two readers there may end up remembering the lower version.
    fcntl = None  # type: ignore[assignment]

_HINT = "set XDG_STATE_HOME to a folder of this user"


def state_folder() -> Path:
    """Returns the folder for what deltawire remembers on this machine; raises `InputError`."""
    base = os.environ.get("XDG_STATE_HOME", "")
    try:
        home = Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state"  # noqa: PTH117
    except RuntimeError as error:
        raise InputError("this user has no home folder", hint=_HINT) from error
    return home / "deltawire" / "versions"


class HighestVersion:
    """The highest version, or decision, of one run that a reader on this machine has seen.

    Example::

        highest = HighestVersion(run.public_key, run.id, bucket.url)
        seen = highest.read()
        highest.check(newest_version(bucket), seen=seen, allow_rollback=False)
        highest.note(newest + 1)
    """

    def __init__(
        self,
        public_key: str,
        run_id: str,
        url: str,
        *,
        kind: Literal["version", "decision"] = "version",
        folder: Path | None = None,
    ) -> None:
        place = blake3(url.encode()).hexdigest()[:16]
        suffix = "" if kind == "version" else f"-{kind}"
        self._path = (folder or state_folder()) / f"{public_key[:16]}-{run_id}-{place}{suffix}"
        self._kind = kind
        self._url = url
        self._noted = -1
        self._lock = threading.Lock()

    def read(self) -> int:
        """Returns the highest version seen, -1 if none was.

        Raises `InputError` if the file is another user's, a link, or damaged.
        """
        private_folder(self._path.parent)
        data = read_private(self._path, 64)
        if data is None:
            return -1
        text = data.decode("ascii", "replace").strip()
        if not text.removeprefix("-").isdigit():
            raise InputError(
                f"{self._path} does not hold a {self._kind}",
                hint=f"remove it to forget the {self._kind}",
            )
        return int(text)

    def check(self, newest: int, *, seen: int, allow_rollback: bool) -> None:
        """Records ``newest``, the newest version in the bucket (-1: none).

        ``seen`` is the result of `read` from before the bucket was read: other readers on this
        machine may record newer versions meanwhile. Raises `SignatureError` if ``newest`` is older,
        unless ``allow_rollback``: then it replaces what was remembered.
        """
        if newest >= seen:
            self.note(newest)
            return
        if not allow_rollback:
            there_is = f"{self._kind} {newest}" if newest >= 0 else f"no {self._kind}"
            raise SignatureError(
                f"the newest here is {there_is}, but {self._kind} {seen} was read on this "
                "machine before",
                hint="the bucket shows an old state, or was restored; --allow-rollback accepts it",
                run=self._url,
            )
        with self._locked():
            replace_private(self._path, f"{newest}\n".encode())
            self._noted = newest

    def note(self, version: int) -> None:
        """Remembers ``version`` if it is higher than all seen before."""
        with self._lock:
            if version <= self._noted:
                return
            self._noted = version
        with self._locked():
            if version > self.read():
                replace_private(self._path, f"{version}\n".encode())

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        folder = private_folder(self._path.parent)
        try:
            descriptor = open_private(folder / ".lock", os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise InputError(
                f"cannot remember versions in {folder}: {error.strerror or error}", hint=_HINT
            ) from error
        try:
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

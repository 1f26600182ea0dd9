"""The journal of a bisection: its settings, then a line for each answer, so that it continues."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from deltawire.errors import CorruptError, InputError

MAX_JOURNAL_BYTES = 64 << 20
_FINISH = "name another folder by --state, or remove this one to begin again"


class BisectSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The question of a bisection; the answers of another question do not count for it."""

    run: str
    good: int
    bad: int
    noisy: bool
    command: list[str]
    format: int = 1
    serve: bool = False


class BisectAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The status that the command ended with on a version, or, for a version that could not be
    read, 125 and ``error``."""

    version: int
    status: int
    seconds: float = 0.0
    error: str = ""


class Journal:
    """Answers in the order in which they came, each on the disk before the next question.

    Raises `InputError` if the file holds the answers to another question, or cannot be written, and
    `CorruptError` if a line of it is damaged. A last line that is incomplete was being written when
    the machine stopped, and is dropped.

    Example::

        journal = Journal(Path("state"), settings)
        journal.append(BisectAnswer(80, 1))
    """

    def __init__(self, folder: Path, settings: BisectSettings) -> None:
        self.path = folder / "journal.jsonl"
        self.answers: list[BisectAnswer] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            data = self.path.read_bytes() if self.path.exists() else b""
        except OSError as error:
            raise InputError(f"cannot read {self.path}: {error.strerror or error}") from error
        if len(data) > MAX_JOURNAL_BYTES:
            raise InputError(f"{self.path} has more than {MAX_JOURNAL_BYTES} bytes", hint=_FINISH)
        whole = data[: data.rfind(b"\n") + 1]
        lines = whole.splitlines()
        try:
            if lines and msgspec.json.decode(lines[0], type=BisectSettings) != settings:
                raise InputError(f"{folder} holds another bisection", hint=_FINISH)
            self.answers = [msgspec.json.decode(line, type=BisectAnswer) for line in lines[1:]]
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CorruptError(f"{self.path} is damaged: {error}", hint=_FINISH) from error
        if any(not settings.good <= one.version <= settings.bad for one in self.answers):
            raise CorruptError(f"{self.path} names a version out of range", hint=_FINISH)
        if len(whole) < len(data):
            os.truncate(self.path, len(whole))
        if not lines:
            self._write(settings)

    def append(self, answer: BisectAnswer) -> None:
        """Adds an answer, and returns once it is on the disk."""
        self._write(answer)
        self.answers.append(answer)

    def _write(self, line: msgspec.Struct) -> None:
        try:
            with self.path.open("ab") as file:
                file.write(msgspec.json.encode(line) + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise InputError(f"cannot write {self.path}: {error.strerror or error}") from error

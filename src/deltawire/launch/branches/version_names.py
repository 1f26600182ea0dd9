"""Parses ``RUN@V`` and ``RUN@NAME``: a run, and one of its versions."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from deltawire.errors import InputError
from deltawire.runtime.trusted import ReaderTrust, open_trusted
from deltawire.store import Bucket
from deltawire.sync import newest_readable, read_run
from deltawire.sync.chain.tags import tagged_version
from deltawire.wire import keys
from deltawire.wire.run import Run

MAX_DIGITS = 12


class VersionName(NamedTuple):
    """A run's location, and one of its versions: a number, or a tag's name. None of both stands for
    the newest.

    Example::

        VersionName.parse("s3://bucket/run@120")
    """

    location: str
    version: int | None
    tag: str | None = None

    @classmethod
    def parse(cls, text: str) -> VersionName:
        """Splits at the last ``@``; a file or folder whose own name contains it is meant whole."""
        location, _, word = text.rpartition("@")
        if location and not Path(text).exists():
            if word.isascii() and word.isdigit() and len(word) <= MAX_DIGITS:
                return cls(location, int(word))
            if keys.valid_tag(word):
                return cls(location, None, word)
        return cls(text, None)

    def open(self, trust: ReaderTrust) -> tuple[Bucket, Run, int | None]:
        """Opens the run, and returns its bucket, its run and the version; None stands for the
        newest. Raises `InputError` if the run has no such tag, and as `open_trusted`."""
        bucket = open_trusted(self.location, trust)
        run = read_run(bucket)
        return bucket, run, tagged_version(bucket, run, self.tag) if self.tag else self.version


def version_of(bucket: Bucket, run: Run, text: str) -> int:
    """Returns the version that a number or a tag's name means.

    Raises `InputError` for any other text, and if the run has no such tag.
    """
    if text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS:
        return int(text)
    if not keys.valid_tag(text):
        raise InputError(f"{text[:80]!r} is neither a version nor a tag", run=bucket.url)
    return tagged_version(bucket, run, text)


def open_version(text: str, trust: ReaderTrust) -> tuple[Bucket, Run, int]:
    """Opens the run that ``RUN@V`` or ``RUN@NAME`` names, and returns its bucket, its run and the
    version.

    Raises `InputError` if the run has no version yet, and as `VersionName.open`.
    """
    bucket, run, version = VersionName.parse(text).open(trust)
    if version is not None:
        return bucket, run, version
    newest = newest_readable(bucket, run)
    if newest is None:
        raise InputError("the run has no version yet", run=bucket.url)
    return bucket, run, newest.version

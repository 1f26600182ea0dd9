"""Parses ``RUN@V``: a run, and one of its versions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from deltawire.errors import InputError
from deltawire.runtime.trusted import ReaderTrust, open_trusted
from deltawire.store import Bucket
from deltawire.sync import newest_readable, read_run
from deltawire.wire.run import Run

_VERSION = re.compile(r"\A(.+)@(\d{1,12})\Z", re.DOTALL)


class VersionName(NamedTuple):
    """A run's location, and one of its versions; None stands for the newest.

    Example::

        VersionName.parse("s3://bucket/run@120")
    """

    location: str
    version: int | None

    @classmethod
    def parse(cls, text: str) -> VersionName:
        """Splits at the last ``@``; a folder whose own name ends in ``@`` and a number is a run."""
        found = _VERSION.match(text)
        if found is None or Path(text).is_dir():
            return cls(text, None)
        return cls(found[1], int(found[2]))


def open_version(text: str, trust: ReaderTrust) -> tuple[Bucket, Run, int]:
    """Opens the run that ``RUN@V`` names, and returns its bucket, its run and the version.

    Raises `InputError` if the run has no version yet, and as `open_trusted`.
    """
    name = VersionName.parse(text)
    bucket = open_trusted(name.location, trust)
    run = read_run(bucket)
    if name.version is not None:
        return bucket, run, name.version
    newest = newest_readable(bucket, run)
    if newest is None:
        raise InputError("the run has no version yet", run=bucket.url)
    return bucket, run, newest.version

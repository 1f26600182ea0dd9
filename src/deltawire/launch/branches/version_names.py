"""Parses ``RUN@V``: a run, and one of its versions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from deltawire.errors import InputError
from deltawire.store import Bucket
from deltawire.sync import newest_readable
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

    def number(self, bucket: Bucket, run: Run) -> int:
        """Returns the version's number; raises `InputError` if the run has no version yet."""
        if self.version is not None:
            return self.version
        newest = newest_readable(bucket, run)
        if newest is None:
            raise InputError("the run has no version yet", run=bucket.url)
        return newest.version

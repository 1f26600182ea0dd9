"""The errors that deltawire raises, one class for each thing that a caller can do next."""

from __future__ import annotations

from deltawire.display import safe_line


class DeltawireError(Exception):
    """The base class: a sentence on what happened and where, and a hint on what to do.

    ``run`` is a bucket URL, ``version`` a policy version, ``key`` an object's key in the bucket.

    Example::

        raise InputError("there is no run here", hint="check the path", run=bucket.url)
    """

    exit_code = 1

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        run: str = "",
        version: int | None = None,
        key: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.run = run
        self.version = version
        self.key = key

    def __str__(self) -> str:
        """Format one line, safe to print: names from buckets may hold escapes, URLs credentials."""
        place = [
            f"{word} {value}"
            for word, value in (("run", self.run), ("version", self.version), ("key", self.key))
            if value not in ("", None)
        ]
        text = self.message + (f" ({', '.join(place)})" if place else "")
        text += f"; {self.hint}" if self.hint else ""
        return safe_line(" ".join(text.split()))


class RetryError(DeltawireError):
    """The store did not answer in time: the same call may succeed later."""

    exit_code = 75


class ThrottledError(RetryError):
    """The store refused the request because there were too many; nothing is wrong with it."""


class UnreadableError(RetryError):
    """Every answer to the read of an object was damaged, or contradicted a listing: it is unknown
    whether the object is sound, and nothing was done that depends on it."""


class ResyncError(DeltawireError):
    """The objects read do not continue what the reader holds: plan a new route from the bucket."""

    exit_code = 3


class CorruptError(ResyncError):
    """An object's bytes are not what its name, its manifest or its format says."""


class SignatureError(CorruptError):
    """An object of a signed run that the holder of its role's key did not sign for this place and
    run: somebody else wrote it, or shows an older one again."""


class InputError(DeltawireError):
    """The configuration, the model, the bucket or the machine must be changed first."""

    exit_code = 2


class StoppedError(InputError):
    """A run crossed a limit at which its configuration stops it.

    Nothing is lost: fix the cause or change the limit, and the same command continues the run.
    """

    exit_code = 7


class OutOfMemoryError(DeltawireError):
    """A process needed more memory than its machine has: change the settings that are named."""

    exit_code = 10


class FencedError(DeltawireError):
    """Another writer has taken this role: stop, and write nothing more."""

    exit_code = 4


class BugError(DeltawireError):
    """An invariant of deltawire itself does not hold: report it."""

    exit_code = 70

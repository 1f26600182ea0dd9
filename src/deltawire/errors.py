"""Every error deltawire raises, one kind for each thing a caller can do next."""

from __future__ import annotations


class DeltawireError(Exception):
    """The base of all of them: one sentence that says what and where, and a hint what to do.

    ``run`` is a bucket URL, ``version`` a policy version, ``key`` an object's key in the bucket.
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
        """One line, whatever the message was made of: names come out of buckets, and may hold what
        a terminal would obey."""
        place = [
            f"{word} {value}"
            for word, value in (("run", self.run), ("version", self.version), ("key", self.key))
            if value not in ("", None)
        ]
        text = self.message + (f" ({', '.join(place)})" if place else "")
        text += f"; {self.hint}" if self.hint else ""
        line = " ".join(text.split())
        return "".join(letter if letter.isprintable() else "·" for letter in line)


class RetryError(DeltawireError):
    """The store did not answer, or not in time: the same call may succeed later."""

    exit_code = 75


class ResyncError(DeltawireError):
    """What was read does not continue what the reader holds: plan again from the bucket."""

    exit_code = 3


class CorruptError(ResyncError):
    """An object's bytes are not what its name, its manifest or its format says."""


class InputError(DeltawireError):
    """The configuration, the model, the bucket or the machine must be changed first."""

    exit_code = 2


class StoppedError(InputError):
    """What a run watches crossed a limit that its configuration stops at. Nothing is lost: look
    why, then mend the cause or move the limit, and the same command goes on from there."""

    exit_code = 7


class FencedError(DeltawireError):
    """Another writer has taken this role: stop, and write nothing more."""

    exit_code = 4


class BugError(DeltawireError):
    """An invariant of deltawire itself does not hold: report it."""

    exit_code = 70

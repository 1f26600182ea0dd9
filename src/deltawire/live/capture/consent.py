"""Consent: decides whether an answer may be stored. Without a rule nothing is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from deltawire.errors import InputError
from deltawire.live.capture.pseudonyms import Pseudonyms

CAPTURE_HEADER = "x-deltawire-capture"
MAX_USERS_BYTES = 64 << 20


@dataclass(frozen=True)
class ConsentRule:
    """Allows the storing of an answer by any of three rules: the request's header says so
    (``header``), its user is listed (``users``, pseudonyms), or is among a ``share`` of all users,
    chosen by hash. A request whose header says no is never stored.
    """

    header: bool = False
    users: frozenset[str] = frozenset()
    share: float = 0.0

    @property
    def on(self) -> bool:
        """Returns whether any answer may be stored."""
        return self.header or bool(self.users) or self.share > 0

    def allows(self, header: str, user: str) -> bool:
        """Returns whether an answer to ``user`` (a pseudonym, or empty) may be stored; ``header``
        is the value of `CAPTURE_HEADER`."""
        said = header.strip().lower()
        if said in ("false", "0", "no", "off"):
            return False
        if self.header and said in ("true", "1", "yes", "on"):
            return True
        if not user:
            return False
        if user in self.users:
            return True
        place = int.from_bytes(blake3(f"capture\0{user}".encode()).digest(8), "big")
        return place < self.share * 2.0**64


def read_users(path: str, pseudonyms: Pseudonyms) -> frozenset[str]:
    """Returns the pseudonyms of the users in a file that names one a line; raises `InputError`."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_USERS_BYTES + 1)
        lines: Iterable[str] = data.decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise InputError(f"cannot read the users in {path}: {reason}") from error
    if len(data) > MAX_USERS_BYTES:
        raise InputError(f"{path} exceeds {MAX_USERS_BYTES} bytes", hint="use --capture-share")
    return frozenset(pseudonyms.user(line.strip()) for line in lines if line.strip())

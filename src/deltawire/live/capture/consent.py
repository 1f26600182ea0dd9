"""Consent: decides whether an answer may be stored. Without a rule nothing is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from deltawire.errors import InputError
from deltawire.live.capture.names import normalize_name
from deltawire.live.capture.pseudonyms import Pseudonyms

CAPTURE_HEADER = "x-deltawire-capture"
YES = frozenset({"true", "1", "yes", "on"})
MAX_USERS_BYTES = 64 << 20


@dataclass(frozen=True)
class ConsentRule:
    """Allows the storing of an answer by any of three rules: the request's header says so
    (``header``), its user is listed (``users``, pseudonyms), or is among a ``share`` of all users,
    chosen by hash. A request whose header says anything but yes is never stored: only the words of
    `YES` are consent. Users are pseudonyms of the oldest generation of the deployment's secret, so
    that a rotation changes no user's consent.
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
        if said and said not in YES:
            return False
        if self.header and said:
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
    except OSError as error:
        raise InputError(f"cannot read the users in {path}: {error.strerror or error}") from error
    if b"\0" in data or data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise InputError(
            f"cannot read the users in {path}: it is not text", hint="save it as UTF-8"
        )
    if len(data) > MAX_USERS_BYTES:
        raise InputError(f"{path} exceeds {MAX_USERS_BYTES} bytes", hint="use --capture-share")
    names = (normalize_name(line) for line in data.splitlines())
    return frozenset(pseudonyms.user(name) for name in names if name)

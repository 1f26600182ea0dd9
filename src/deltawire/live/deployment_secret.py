"""The deployment's secret: what pseudonyms, arms and receipts of all its gateways follow from.

::

    secret, held by the operator            live/secrets/<n>.json, in the bucket
      generation 0 ─────────────────────────▶ fingerprint of 0
      generation 1 ─────────────────────────▶ fingerprint of 1       in use: the newest there
      generation 2, made by a rotation        (not there yet: receipts of it can be read)

Its text is one word a generation, separated by white space, so that it fits into a file, a variable
or a Kubernetes secret. No generation is ever taken out: users, receipts and canaries of earlier
ones stay known by it. A generation that was *adopted* is what an older gateway derived its
pseudonyms from; nothing new is made with it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from blake3 import blake3

from deltawire.errors import InputError
from deltawire.live.capture.names import normalize_name, spellings_of
from deltawire.live.capture.pseudonyms import Pseudonyms
from deltawire.store import Bucket
from deltawire.sync.chain.evidence import listed_twice, require_agreed
from deltawire.wire import keys
from deltawire.wire.live_secret import MAX_GENERATION_BYTES, MAX_GENERATIONS, GenerationRecord
from deltawire.wire.objects import decode_json
from deltawire.wire.receipts import ReceiptKeys
from deltawire.wire.seal import Signer

MAX_SECRET_CHARACTERS = 1 << 16
_FINGERPRINT = "deltawire 2026 fingerprint of a deployment's secret"
_RECEIPTS = "deltawire 2026 receipts of a deployment"
_NEW = re.compile(r"dwsecret-([0-9a-f]{64})")
_ADOPTED = re.compile(r"dwadopted-([0-9a-f]{128})-([0-9a-f]{64})")
_HINT = "deltawire live secret create RUN makes one; a deployment has one, which all gateways share"


@dataclass(frozen=True)
class Generation:
    """One generation: its secret bytes, and for an adopted one the public key of the older
    gateway's receipts."""

    secret: bytes = field(repr=False)
    public_key: str = ""

    @classmethod
    def generate(cls) -> Generation:
        """Makes a new generation."""
        return cls(secrets.token_bytes(32))

    @classmethod
    def adopt(cls, signer: Signer) -> Generation:
        """Returns the generation that a gateway without a secret derived from its signing key:
        Ed25519 signatures are deterministic."""
        return cls(signer.sign(b"deltawire pseudonyms 1\0"), signer.public_key)

    @property
    def adopted(self) -> bool:
        """Returns whether an older gateway's key made this generation."""
        return bool(self.public_key)

    @cached_property
    def fingerprint(self) -> str:
        """The generation's public name, 32 hexadecimal digits."""
        return blake3(self.secret, derive_key_context=_FINGERPRINT).hexdigest()[:32]

    @cached_property
    def pseudonyms(self) -> Pseudonyms:
        """The pseudonyms of this generation."""
        return Pseudonyms(self.secret)

    @cached_property
    def receipt_key(self) -> bytes:
        """The key that seals receipts."""
        return blake3(self.secret, derive_key_context=_RECEIPTS).digest()

    def text(self) -> str:
        """Returns the generation's word in the secret's text."""
        kind = "dwadopted" if self.adopted else "dwsecret"
        return "-".join([kind, self.secret.hex(), *([self.public_key] if self.adopted else [])])


def parse_secret(text: str, *, place: str) -> list[Generation]:
    """Returns the generations in a secret's text; raises `InputError`, which names ``place`` and
    shows nothing of the text."""
    words = text.split() if len(text) <= MAX_SECRET_CHARACTERS else []
    found = []
    for word in words:
        if (new := _NEW.fullmatch(word)) is not None:
            found.append(Generation(bytes.fromhex(new[1])))
        elif (old := _ADOPTED.fullmatch(word)) is not None:
            found.append(Generation(bytes.fromhex(old[1]), old[2]))
        else:
            found.clear()
            break
    if not found:
        raise InputError(f"{place} holds no secret of a deployment", hint=_HINT)
    return list({one.fingerprint: one for one in found}.values())


def secret_text(generations: Iterable[Generation]) -> str:
    """Returns the text that `parse_secret` reads, one line a generation."""
    return "".join(f"{one.text()}\n" for one in generations)


def read_generations(bucket: Bucket, run: str) -> list[GenerationRecord]:
    """Returns the fingerprints in a run's bucket, by number.

    Raises `CorruptError` for one that is damaged or of another place, because it may hide a
    generation, and `RetryError`.
    """
    found: list[GenerationRecord] = []
    for key in listed_twice(bucket, keys.LIVE_SECRETS):
        number = keys.trailing_number(key)
        if number is None or key != keys.live_secret(number):
            continue
        data = require_agreed(bucket, key, limit=MAX_GENERATION_BYTES, so="nothing was done")
        if data is None:
            continue
        record = decode_json(data, GenerationRecord, run=bucket.url, key=key)
        if (record.number, record.run) != (number, run) or number != len(found):
            raise InputError(
                "a fingerprint of the deployment's secret is of another run or number",
                hint="find out who wrote it; the owner of the bucket may delete it",
                run=bucket.url,
                key=key,
            )
        found.append(record)
        if len(found) > MAX_GENERATIONS:
            raise InputError(f"more than {MAX_GENERATIONS} generations", run=bucket.url, key=key)
    return found


def current_generation(records: Iterable[GenerationRecord]) -> int | None:
    """Returns the number of the generation in use; None if there is none."""
    return max((one.number for one in records if not one.adopted), default=None)


class DeploymentSecret:
    """The generations that the operator holds, matched with those that the bucket names.

    ``current`` is the generation in use and ``numbered`` holds each one by its number. ``held``
    are all fingerprints, also of a generation that a rotation has not put into use.

    Raises `InputError` if the bucket names no generation, or one that is not held.

    Example::

        secret = DeploymentSecret(parse_secret(text, place="the file"), bucket, run.id)
        secret.current.pseudonyms.user("alice")
    """

    def __init__(self, generations: Iterable[Generation], bucket: Bucket, run: str) -> None:
        records = read_generations(bucket, run)
        by_name = {one.fingerprint: one for one in generations}
        number = current_generation(records)
        if number is None:
            raise InputError(
                "the run has no secret for pseudonyms, arms and receipts yet",
                hint="make one with deltawire live secret create RUN",
                run=bucket.url,
            )
        missing = [one for one in records if one.fingerprint not in by_name]
        if missing:
            raise InputError(
                f"this is not the deployment's secret: it lacks generation {missing[0].number}, "
                f"whose fingerprint is {missing[0].fingerprint}",
                hint="give the secret that deltawire live secret create or rotate wrote",
                run=bucket.url,
                key=keys.live_secret(missing[0].number),
            )
        self.numbered: Mapping[int, Generation] = {
            one.number: by_name[one.fingerprint] for one in records
        }
        self.current_number = number
        self.current = self.numbered[number]
        self.held: Mapping[str, Generation] = by_name
        self.receipt_keys = ReceiptKeys(
            {one.fingerprint: one.receipt_key for one in by_name.values() if not one.adopted},
            frozenset(one.public_key for one in by_name.values() if one.adopted),
        )

    def lives(self, name: str, readmitted: Container[str]) -> list[list[str]]:
        """Returns, for each generation that is held, and for adopted ones each spelling, the
        pseudonyms under which a user may be stored, the present one last."""
        whole = normalize_name(name)
        found = []
        for one in self.held.values():
            spellings = spellings_of(name) if one.adopted else (whole,)
            found += [one.pseudonyms.lives(text, readmitted) for text in spellings]
        return found

    def known(self, name: str, readmitted: Container[str]) -> dict[int, list[str]]:
        """Returns a normalized name's pseudonyms by generation, the present one last."""
        return {
            number: one.pseudonyms.lives(name, readmitted) for number, one in self.numbered.items()
        }

    @property
    def oldest(self) -> Generation:
        """The first generation: shares of users follow from it, so that a rotation changes none."""
        return self.numbered[0]


def generation_in_use(bucket: Bucket, run: str) -> int:
    """Returns the number of the generation in use, 0 if there is none, for a process that decides
    and needs no secret. Raises `RetryError`."""
    return current_generation(read_generations(bucket, run)) or 0

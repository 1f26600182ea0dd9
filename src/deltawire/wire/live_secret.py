"""Fingerprints of a deployment's secret: which generations it has, without the secret itself.

``live/secrets/<n>.json``, numbered from 0, is created if absent: of two processes that create or
rotate the secret at once one succeeds. The newest generation that is not ``adopted`` is in use. In
a signed run the role ``gateway`` signs these objects.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from deltawire.wire.objects import FORMAT
from deltawire.wire.payload import Index
from deltawire.wire.run import Identity, Key

MAX_GENERATION_BYTES = 1 << 12
MAX_GENERATIONS = 256

Fingerprint = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]


class GenerationRecord(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="format", tag=FORMAT
):
    """The object at ``live/secrets/<number>.json``.

    ``fingerprint`` names the generation and reveals nothing of it. An ``adopted`` generation is one
    from which an older gateway made its pseudonyms; ``public_key`` checks that gateway's receipts.
    """

    number: Index
    run: Identity
    fingerprint: Fingerprint
    at: float
    adopted: bool = False
    public_key: Key = ""


class Readmitted(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="format", tag=FORMAT
):
    """The object at ``live/readmitted/<pseudonym>.json``: the user who was forgotten under this
    pseudonym may be stored again, under the next one."""

    run: Identity
    at: float

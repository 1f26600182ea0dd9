"""Encodes and decodes ``references/``: sealed objects, each with the reference's log-probabilities
of one group.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from deltawire.errors import CorruptError
from deltawire.wire.objects import FORMAT
from deltawire.wire.payload import Index, Sum
from deltawire.wire.run import Identity
from deltawire.wire.seal import Signer, seal, unseal

MAX_SCORES_BYTES = 128 << 20
MAX_SEQUENCES = 8192


class ReferenceScores(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="format", tag=FORMAT
):
    """Log-probabilities of the group that ``worker`` stored under ``sequence``.

    ``group`` is the hash of the group's bytes, as in commit metadata; ``model`` is the digest of
    the weights that computed the log-probabilities. ``logprobs`` has an entry for each trajectory
    of the group: little-endian float32 for each token, 0 where the environment wrote it; empty for
    a trajectory that is not trained on.
    """

    run: Identity
    worker: Annotated[str, Meta(max_length=64)]
    sequence: Index
    group: Annotated[str, Meta(pattern=r"^[0-9a-f]{1,64}\Z")]
    model: Sum
    logprobs: Annotated[list[bytes], Meta(min_length=1, max_length=MAX_SEQUENCES)]


def encode_scores(scores: ReferenceScores, *, key: str, signer: Signer | None = None) -> bytes:
    """Returns the sealed object at ``key``."""
    return seal(scores, key=key, signer=signer)


def decode_scores(data: bytes, *, run: str, key: str) -> ReferenceScores:
    """Checks and decodes scores; raises `CorruptError`, also for values that cannot be
    log-probabilities.
    """
    scores = unseal(data, ReferenceScores, run=run, key=key, what="reference")
    for bits in scores.logprobs:
        fault = "an array is not a whole number of float32 values" if len(bits) % 4 else ""
        if not fault:
            values = np.frombuffer(bits, "<f4")
            if not np.isfinite(values).all() or (values > 1e-3).any():
                fault = "a log-probability is not finite or is above 0"
        if fault:
            raise CorruptError(f"reference: {fault}", run=run, key=key)
    return scores


def arrays_of(scores: ReferenceScores) -> list[NDArray[np.float32]]:
    """Returns the log-probabilities of each trajectory: float32[T], or [0]."""
    return [np.frombuffer(bits, "<f4") for bits in scores.logprobs]

"""Scores a stored group with the trainer's arithmetic, on request: the gap of each single token.

The trainer keeps sums over a step only. The versions that drew a group's tokens are in the bucket,
so the same model is filled from them again and reads the same tokens.
"""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from deltawire.config import RunConfig
from deltawire.errors import InputError
from deltawire.parity.routes import NOT_RECORDED, RouteShape
from deltawire.store import Bucket
from deltawire.watch.weights import MAX_MEASURED_BYTES
from deltawire.wire.rollouts import Group
from deltawire.wire.run import Run

MAX_SCORED_VERSIONS = 4
"""Versions of one answer: each takes a pass over the group with its own weights."""
MAX_SCORED_TOKENS = 100_000
"""Tokens of a group, prompts included."""


class TrainerTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer's log-probability (nats) of the tokens ``first`` to ``first + len(logprobs)`` of
    an answer, each with the weights of the version that drew it.

    None where no model drew the token, and for tokens of versions in ``unread``: their weights were
    deleted, or the answer has more than `MAX_SCORED_VERSIONS`. ``mean_gap`` is the mean of
    the absolute difference to the sampler over all scored tokens of the answer, ``largest_gap`` its
    maximum.

    ``flips`` counts, for each token, the sampler's expert choices that the trainer's own router did
    not make, of ``choices`` that a token takes, and ``flipped_layers`` names the expert layers they
    are in; None and empty where no choices were recorded. ``flipped_share`` is the share over all
    scored tokens of the answer. Where ``parity.routes`` replays choices, the log-probabilities are
    computed with the sampler's.
    """

    first: int
    logprobs: list[float | None]
    versions: list[int]
    unread: list[int]
    mean_gap: float | None
    largest_gap: float | None
    flips: list[int | None] | None = None
    flipped_layers: list[list[int]] = []
    choices: int = 0
    flipped_share: float | None = None


class TrainerScores:
    """Scores groups of one run; any thread may ask, one is answered at a time.

    The model is loaded at the first request and kept. The weights move forward from version to
    version; a request for an older one starts at an anchor.

    Example::

        scores = TrainerScores(bucket, run, config)
        scores.of(group, answer=0, first=0, limit=4000).mean_gap
    """

    def __init__(self, bucket: Bucket, run: Run, config: RunConfig | None) -> None:
        self._bucket = bucket
        self._run = run
        self._config = config
        self._lock = threading.Lock()
        self._model: object = None

    def of(self, group: Group, answer: int, *, first: int, limit: int) -> TrainerTokens:
        """Returns the log-probabilities of at most ``limit`` tokens from ``first`` on.

        Raises `InputError` for a failed episode, a group that is too long, and a model that is too
        large or cannot be loaded here.
        """
        places = [place for place, _, _ in group.trained()]
        if answer not in places:
            raise InputError(
                f"answer #{answer} is not one that is trained on",
                hint="failed episodes are not scored",
            )
        read = sum(len(group.prompt_of(t)) + len(t.tokens_T) for t in group.trajectories)
        if read > MAX_SCORED_TOKENS:
            raise InputError(
                f"the group has {read} tokens; the page scores up to {MAX_SCORED_TOKENS}",
                hint="compare whole steps with deltawire parity",
            )
        trajectory = group.trajectories[answer]
        drawn_T = trajectory.mask_T == 1
        wanted = np.unique(trajectory.versions_T[drawn_T]).tolist()
        found_T = np.full(len(drawn_T), np.nan)
        flips_TL: NDArray[np.int32] | None = None
        used: list[int] = []
        with self._lock:
            for version in wanted[:MAX_SCORED_VERSIONS]:
                scored = self._score(group, version)
                if scored is None:
                    continue
                here_T = drawn_T & (trajectory.versions_T == version)
                logprobs, flips = scored
                found_T[here_T] = logprobs[places.index(answer)][here_T]
                if flips and trajectory.routes:
                    part_TL = flips[places.index(answer)]
                    if flips_TL is None:
                        flips_TL = np.full_like(part_TL, NOT_RECORDED)
                    flips_TL[here_T] = part_TL[here_T]
                used.append(version)
        gaps = np.abs(found_T - trajectory.logprobs_T)[~np.isnan(found_T)]
        tokens = TrainerTokens(
            first=first,
            logprobs=[None if x != x else x for x in found_T[first : first + limit].tolist()],  # noqa: PLR0124
            versions=used,
            unread=[version for version in wanted if version not in used],
            mean_gap=float(gaps.mean()) if len(gaps) else None,
            largest_gap=float(gaps.max()) if len(gaps) else None,
        )
        if flips_TL is None:
            return tokens
        return _with_flips(tokens, flips_TL, RouteShape.of(trajectory.routes), first, limit)

    def _score(
        self, group: Group, version: int
    ) -> tuple[list[NDArray[np.float32]], list[NDArray[np.int32]]] | None:
        from deltawire.rl.evaluate.recorded_model import RecordedModel

        if self._model is None:
            self._model = self._open()
        assert isinstance(self._model, RecordedModel)
        assert self._config is not None
        return self._model.traced(group, version, self._config.parity)

    def _open(self) -> object:
        from deltawire.codec import ITEMSIZE

        if self._config is None:
            raise InputError("the run has no configuration that this release can read")
        size = sum(one.count * ITEMSIZE[one.dtype] for one in self._run.tensors)
        if size > MAX_MEASURED_BYTES:
            raise InputError(
                f"the model has {size / 2**30:.1f} GiB; the page scores models up to "
                f"{MAX_MEASURED_BYTES >> 30} GiB",
                hint="compare engines with deltawire parity on a larger machine",
            )
        try:
            from deltawire.export.models import fetch_model_files
            from deltawire.rl.evaluate.recorded_model import RecordedModel
        except ImportError as error:
            raise InputError(
                f"{error.name} is not installed", hint="install deltawire[rl]"
            ) from error
        with fetch_model_files(self._bucket, self._run) as folder:
            model = RecordedModel(self._bucket, self._run, self._config, Path(folder))
        if model.lacking:
            raise InputError(model.lacking)
        return model


def _with_flips(
    tokens: TrainerTokens, flips_TL: NDArray[np.int32], shape: RouteShape, first: int, limit: int
) -> TrainerTokens:
    """Adds flips, int32[T, L], of the tokens from ``first`` on."""
    known_T = (flips_TL != NOT_RECORDED).all(1)
    choices = shape.layers * shape.chosen
    compared = int(known_T.sum()) * choices
    page, known = flips_TL[first : first + limit], known_T[first : first + limit]
    sums = page.sum(1).tolist()
    return msgspec.structs.replace(
        tokens,
        flips=[count if on else None for count, on in zip(sums, known.tolist(), strict=True)],
        flipped_layers=[np.flatnonzero(row > 0).tolist() for row in page],
        choices=choices,
        flipped_share=int(flips_TL[known_T].sum()) / compared if compared else None,
    )

"""The trainer's side of the reference process: reads the scores of a step's groups, and waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from deltawire.errors import CorruptError, RetryError
from deltawire.rl.control.rollout_buffer import BufferedGroup
from deltawire.runtime.process import Process
from deltawire.store import Bucket
from deltawire.train.loss.preference import with_better_answers
from deltawire.train.reference import RecordedReference, Reference
from deltawire.wire import keys
from deltawire.wire.reference_scores import (
    MAX_SCORES_BYTES,
    ReferenceScores,
    arrays_of,
    decode_scores,
)
from deltawire.wire.run import Run

SAID_AFTER_S = 10.0
STORE_PATIENCE_S = 300.0
READS = 3


class ReferenceReader:
    """Reads the scores that a reference process has stored.

    ``model`` is the digest that the reference must have, empty where the first scores decide it.
    All scores of one reader are of one model.
    """

    def __init__(self, bucket: Bucket, run: Run, *, model: str = "") -> None:
        self._bucket = bucket
        self._run = run
        self._model = model
        self._found: dict[tuple[str, int], ReferenceScores] = {}
        self.missing = 0
        """How many groups of the last `read` had no scores yet."""

    def read(self, groups: Sequence[BufferedGroup]) -> RecordedReference | None:
        """The scores of these groups, None while some are missing.

        Raises `CorruptError` for scores of other groups, of another model, or of wrong lengths.
        """
        wanted = {(one.group.worker, one.sequence): one for one in groups}
        self._found = {place: kept for place, kept in self._found.items() if place in wanted}
        for place, one in wanted.items():
            if place not in self._found and (scores := self._fetch(one)) is not None:
                self._found[place] = scores
        self.missing = len(wanted) - len(self._found)
        if self.missing:
            return None
        table: dict[tuple[int, int], NDArray[np.float32]] = {}
        for number, one in enumerate(groups):
            arrays = arrays_of(self._found[one.group.worker, one.sequence])
            table |= {(number, place): values for place, values in enumerate(arrays)}
        return RecordedReference(table)

    def require(self, groups: Sequence[BufferedGroup]) -> RecordedReference:
        """As `read`, for groups that were trained on; raises `CorruptError` if scores are
        missing."""
        found = self.read(groups)
        if found is None:
            raise CorruptError(
                f"the reference's log-probabilities of {self.missing} consumed groups are missing",
                hint="they are kept as long as the groups",
                run=self._bucket.url,
            )
        return found

    def _fetch(self, one: BufferedGroup) -> ReferenceScores | None:
        key = keys.reference(one.group.worker, one.sequence)
        for attempt in range(READS):
            data = self._bucket.get(key, limit=MAX_SCORES_BYTES)
            if data is None:
                return None
            try:
                scores = decode_scores(data, run=self._bucket.url, key=key)
                self._check(scores, one, key)
                return scores
            except CorruptError:
                if attempt == READS - 1:
                    raise
        return None

    def _check(self, scores: ReferenceScores, one: BufferedGroup, key: str) -> None:
        fault = ""
        (group,) = with_better_answers([one.group])
        if scores.run != self._run.id:
            fault = "scores of another run"
        elif (scores.worker, scores.sequence) != (one.group.worker, one.sequence):
            fault = "scores of another group"
        elif one.hash and scores.group != one.hash:
            fault = "scores of other bytes than the group's"
        elif self._model and scores.model != self._model:
            fault = f"scores by the model {scores.model}, not by {self._model}"
        elif len(scores.logprobs) != len(group.trajectories):
            fault = "scores of another number of trajectories"
        else:
            trained = {place for place, _, _ in group.trained()}
            for place, (bits, t) in enumerate(
                zip(scores.logprobs, group.trajectories, strict=True)
            ):
                if len(bits) != (4 * len(t.tokens_T) if place in trained else 0):
                    fault = "scores of another number of tokens"
        if fault:
            raise CorruptError(fault, run=self._bucket.url, key=key)
        self._model = self._model or scores.model


def await_scores(
    process: Process,
    reader: Reference | ReferenceReader | None,
    groups: Sequence[BufferedGroup],
    *,
    tick: Callable[[], None] = lambda: None,
) -> bool:
    """Waits for the scores of a step's groups; returns False if the process was asked to stop. Only
    a `ReferenceReader` is waited for, and ``tick`` is called meanwhile.

    Records an event if the wait is long. The policy's version does not change meanwhile, so waiting
    makes no group older.
    """
    if not isinstance(reader, ReferenceReader):
        return True
    began = answered = time.monotonic()
    said = False
    while not process.stopping:
        process.heartbeat.progress("wait")
        tick()
        try:
            found = reader.read(groups)
            answered = time.monotonic()
        except RetryError:
            if time.monotonic() - answered > STORE_PATIENCE_S:
                raise
            found = None
        if found is not None:
            return True
        if not said and time.monotonic() - began > SAID_AFTER_S:
            said = True
            process.record_life(
                "started",
                f"waiting for the reference: {reader.missing} of {len(groups)} groups have no "
                "log-probabilities; is deltawire reference running?",
            )
        process.wait(process.bucket.poll_s)
    return False

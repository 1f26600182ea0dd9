"""Rollout reader: reads one finished group and checks it against the run's bounds."""

from __future__ import annotations

from dataclasses import dataclass

import blake3
import numpy as np

from deltawire.config import RunConfig
from deltawire.errors import CorruptError
from deltawire.store import Bucket
from deltawire.wire import keys
from deltawire.wire.ledger import GROUP_HASH_DIGITS
from deltawire.wire.rollouts import MAX_GROUP_BYTES, Group, decode_group

READS = 3
"""A group counts as damaged only if every read finds it so: a network may cut an answer short and
report it as complete, and a dropped group is lost."""
LARGEST_REWARD = 1e4
"""The largest magnitude of a reward, in multiples of ``probes.reward_scale``."""
LEAST_LOGPROB = -100.0
"""Nats. A sampler draws no token of a lower log-probability in the lifetime of a run."""


@dataclass(frozen=True)
class Bounds:
    """The limits that every group of a run respects.

    A group that exceeds them was made by no worker of this run: it would stop the trainer, or
    dominate the step of all groups that it is trained on with.
    """

    vocabulary: int
    temperature: float
    context: int
    episodes: int = 1 << 12
    reward: float = LARGEST_REWARD

    @classmethod
    def of(cls, config: RunConfig, vocabulary: int) -> Bounds:
        """The bounds of a run."""
        rollout = config.rollout
        return cls(
            vocabulary,
            rollout.temperature,
            rollout.context,
            rollout.group_size,
            LARGEST_REWARD * config.probes.reward_scale,
        )

    def fault(self, group: Group) -> str:
        """The first bound that a group exceeds, empty if there is none."""
        if group.largest_token >= self.vocabulary:
            return f"a token is not in the vocabulary of {self.vocabulary}"
        if group.temperature != self.temperature:
            return f"sampled at temperature {group.temperature}, not {self.temperature}"
        if len(set(group.episodes)) > self.episodes:
            return f"more than {self.episodes} episodes"
        for t in group.trajectories:
            if len(group.prompt_of(t)) + len(t.tokens_T) > self.context and not t.cause:
                return f"a sequence of more than {self.context} tokens"
            if abs(t.reward) > self.reward:
                return f"a reward of {t.reward:g}, beyond {self.reward:g}"
            if np.min(t.logprobs_T[t.mask_T == 1], initial=0.0) < LEAST_LOGPROB:
                return f"a log-probability below {LEAST_LOGPROB:g}"
        return ""


def read_group(
    bucket: Bucket, worker: str, sequence: int, *, bounds: Bounds | None = None, expected: str = ""
) -> tuple[Group, str] | None:
    """Read a worker's group and the hash of its bytes, None if it does not exist.

    Raises `CorruptError` if the object is not a group of this worker, exceeds its ``bounds``, or
    does not have the hash ``expected``.
    """
    for attempt in range(READS):
        try:
            return _read_once(bucket, worker, sequence, bounds, expected)
        except CorruptError:
            if attempt == READS - 1:
                raise
    return None


def _read_once(
    bucket: Bucket, worker: str, sequence: int, bounds: Bounds | None, expected: str
) -> tuple[Group, str] | None:
    key = keys.rollout(worker, sequence)
    data = bucket.get(key, limit=MAX_GROUP_BYTES)
    if data is None:
        return None
    found = blake3.blake3(data).hexdigest()[:GROUP_HASH_DIGITS]
    if expected and found != expected:
        raise CorruptError("a group is not the one that was trained on", run=bucket.url, key=key)
    group = decode_group(data, run=bucket.url, key=key)
    if group.worker != worker:
        raise CorruptError("a group of another worker", run=bucket.url, key=key)
    if bounds is not None and (fault := bounds.fault(group)):
        raise CorruptError(fault, run=bucket.url, key=key)
    return group, found

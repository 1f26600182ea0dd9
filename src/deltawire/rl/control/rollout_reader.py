"""Rollout reader: reads one finished group and checks it against the run's bounds."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import blake3
import msgspec
import numpy as np

from deltawire.config import RunConfig
from deltawire.config.reuse import sharing_of
from deltawire.config.scaffold import turn_limit
from deltawire.errors import CorruptError
from deltawire.store import Bucket
from deltawire.wire import keys
from deltawire.wire.ledger import GROUP_HASH_DIGITS
from deltawire.wire.rollouts import (
    LIVE_TASK,
    MAX_GROUP_BYTES,
    MAX_THINKING,
    MAX_TRAJECTORIES,
    Group,
    GroupLimits,
    Trajectory,
    decode_group,
)

READS = 3
"""A group counts as damaged only if every read finds it damaged, or two find the same bytes: a
network may truncate an answer and report it as complete, and a dropped group is lost."""
LARGE_GROUP = 16 << 20
"""Bytes from which on groups are read one at a time: a poll has up to 64 readers."""
LARGEST_REWARD = 1e4
"""The largest magnitude of a reward, in multiples of ``probes.reward_scale``."""
MAX_FAILED_PROMPT = 1 << 20
"""Largest prompt of an episode that failed: its length may be the cause."""
MAX_ROUTE_BYTES = 1 << 14
"""Bytes of expert choices for one position: 256 layers of 32 experts in 16 bits."""
_PART_BYTES = 1 << 15
"""The most bytes of a trajectory's cause, probes and other members."""
LEAST_LOGPROB = -100.0
"""Nats. A sampler draws no token of a lower log-probability in the lifetime of a run."""


@dataclass(frozen=True)
class Bounds:
    """The limits that every group of a run respects.

    A group that exceeds them was not made by an honest worker of this run: it would stop the
    trainer, or dominate the step of all groups that it is trained on with. ``drawn`` and ``turns``
    bound the tokens and the turns of one episode, ``routes`` the bytes of one trajectory's expert
    choices; ``budgets`` are those of thinking that the run has. ``pairs`` says that it trains on
    better answers, which only a learner's groups have.
    """

    vocabulary: int
    temperature: float
    context: int
    episodes: int = 1 << 12
    reward: float = LARGEST_REWARD
    drawn: int = 1 << 31
    turns: int = 1 << 31
    routes: int = 1 << 31
    budgets: frozenset[int] = frozenset()
    sharing: int = 1
    pairs: bool = False

    @classmethod
    def of(cls, config: RunConfig, vocabulary: int) -> Bounds:
        """The bounds of a run."""
        rollout = config.rollout
        sums = rollout.on_full == "summary"  # Each turn may be followed by a summary.
        scaffolds = [rollout.scaffold, *config.budget.scaffolds]
        turns = max(turn_limit(msgspec.structs.replace(rollout, scaffold=s)) for s in scaffolds)
        turn = rollout.max_tokens + (rollout.summary_tokens if sums else 0)
        return cls(
            vocabulary,
            rollout.temperature,
            rollout.context,
            max(rollout.allocation.most(rollout.group_size), *config.budget.completions, 0),
            LARGEST_REWARD * config.probes.reward_scale,
            turns * turn,
            turns * (2 if sums else 1),
            0 if config.parity.routes == "off" else rollout.context * MAX_ROUTE_BYTES,
            frozenset() if rollout.thinking is None else rollout.thinking.allowed,
            sharing_of(rollout),
            config.train.loss.preference.kind != "none",
        )

    @property
    def limits(self) -> GroupLimits:
        """Bounds of a group's declared sizes, checked before it is decoded."""
        parts = min(self.episodes * self.turns, MAX_TRAJECTORIES)
        turns = self.episodes * self.turns if self.budgets else 0
        return GroupLimits(
            parts, self.context, MAX_FAILED_PROMPT, self.routes, min(2 * turns, MAX_THINKING)
        )

    @property
    def bytes(self) -> int:
        """The most bytes of a group's object within the bounds: checked before it is read."""
        parts = min(self.episodes * self.turns, MAX_TRAJECTORIES)
        routes, turns = min(self.routes, MAX_GROUP_BYTES), min(self.turns, MAX_GROUP_BYTES)
        # Of a token 13 bytes: id, log-probability, version and mask; 4 in a prompt, and 4 in a
        # better answer.
        part = (21 if self.pairs else 17) * self.context + routes + 32 * turns + _PART_BYTES
        failed = (min(self.episodes, MAX_TRAJECTORIES) + 1) * 4 * MAX_FAILED_PROMPT
        return min(parts * part + failed, MAX_GROUP_BYTES)

    def fault(self, group: Group) -> str:
        """The first bound that a group exceeds, empty if there is none."""
        if group.largest_token >= self.vocabulary:
            return f"a token is not in the vocabulary of {self.vocabulary}"
        if group.temperature != self.temperature:
            return f"sampled at temperature {group.temperature}, not {self.temperature}"
        drawn = dict.fromkeys(group.episodes, 0)
        turns = dict.fromkeys(group.episodes, 0)
        if len(drawn) > self.episodes:
            return f"more than {self.episodes} episodes"
        numbers = group.episodes
        for episode, t in zip(numbers, group.trajectories, strict=True):
            if t.reuse is not None and (
                self.sharing == 1 or numbers[t.reuse.source] != episode - episode % self.sharing
            ):
                return "tokens of an episode that does not share its beginning"
            drawn[episode] += int(t.mask_T.sum())
            turns[episode] += t.turns
            if fault := self._fault_of(t, len(group.prompt_of(t))):
                return fault
            if t.better is not None:
                if not self.pairs or group.task != LIVE_TASK:
                    return "a better answer, which this run does not train on"
                if len(t.better.tokens_T) + len(group.prompt_of(t)) > self.context:
                    return f"a better answer of more than {self.context} tokens"
        if max(drawn.values(), default=0) > self.drawn:
            return f"an episode of more than {self.drawn} drawn tokens"
        if max(turns.values(), default=0) > self.turns:
            return f"an episode of more than {self.turns} turns"
        return ""

    def _fault_of(self, t: Trajectory, prompt: int) -> str:
        # An episode may have failed because its prompt was too long.
        if len(t.tokens_T) + (0 if t.cause else prompt) > self.context:
            return f"a sequence of more than {self.context} tokens"
        if prompt > MAX_FAILED_PROMPT:
            return f"a prompt of more than {MAX_FAILED_PROMPT} tokens"
        if abs(t.reward) > self.reward:
            return f"a reward of {t.reward:g}, beyond {self.reward:g}"
        if t.cause and t.reward:
            return "a reward for an episode that failed"
        if np.min(t.logprobs_T[t.mask_T == 1], initial=0.0) < LEAST_LOGPROB:
            return f"a log-probability below {LEAST_LOGPROB:g}"
        if len(t.routes) > self.routes:
            return f"{len(t.routes)} bytes of expert choices, beyond {self.routes}"
        if not t.cause and (fault := self._thinking_fault(t)):
            return fault
        versions = t.versions_T[t.mask_T == 1]
        if (np.diff(versions) < 0).any():
            return "a token of an older version after one of a newer"
        return ""

    def _thinking_fault(self, t: Trajectory) -> str:
        if t.thinking is None:
            return "no thinking budget" if self.budgets else ""
        if t.thinking.budget not in self.budgets:
            return f"a thinking budget of {t.thinking.budget}, which the run does not have"
        if max((thought for thought, _ in t.thinking.turns), default=0) > t.thinking.budget:
            return f"a turn that thinks more than its budget of {t.thinking.budget} tokens"
        return ""


_LARGE = threading.Lock()


def read_group(
    bucket: Bucket, worker: str, sequence: int, *, bounds: Bounds | None = None, expected: str = ""
) -> tuple[Group, str] | None:
    """Reads a worker's group and the hash of its bytes, None if it does not exist.

    Raises `CorruptError` if the object is not a group of this worker or does not have the hash
    ``expected``, and `deltawire.wire.rollouts.RefusedGroupError` if it exceeds its ``bounds``.

    A group that is refused takes the memory of its object, which ``bounds`` limit, and not of what
    it decodes to. Groups of more than `LARGE_GROUP` bytes are read one at a time. Bytes that were
    refused are decoded once, and are not asked for again after a second answer agreed.
    """
    limit = bounds.bytes if bounds else MAX_GROUP_BYTES
    try:
        return _read(bucket, worker, sequence, bounds, expected, min(limit, LARGE_GROUP))
    except CorruptError:
        size = bucket.size(keys.rollout(worker, sequence)) if limit > LARGE_GROUP else None
        if size is None or size <= LARGE_GROUP:
            raise
    with _LARGE:
        return _read(bucket, worker, sequence, bounds, expected, limit)


def _read(
    bucket: Bucket, worker: str, sequence: int, bounds: Bounds | None, expected: str, limit: int
) -> tuple[Group, str] | None:
    key = keys.rollout(worker, sequence)
    refused: dict[str, CorruptError] = {}
    for attempt in range(READS):
        data = bucket.get(key, limit=limit)
        if data is None:
            return None
        found = blake3.blake3(data).hexdigest()[:GROUP_HASH_DIGITS]
        if found in refused:
            raise refused[found]
        try:
            return _decoded(data, found, bucket, worker, key, bounds, expected), found
        except CorruptError as error:
            refused[found] = without_traceback(error)
            if attempt == READS - 1:
                raise
            del data  # Or it would take memory next to the following answer.
    return None


def without_traceback(error: CorruptError) -> CorruptError:
    """Returns an error that may be kept: its traceback held the bytes that were refused."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def _decoded(
    data: bytes,
    found: str,
    bucket: Bucket,
    worker: str,
    key: str,
    bounds: Bounds | None,
    expected: str,
) -> Group:
    if expected and found != expected:
        raise CorruptError("a group is not the one that was trained on", run=bucket.url, key=key)
    if bounds is None:
        group = decode_group(data, run=bucket.url, key=key)
    else:
        group = decode_group(
            data, run=bucket.url, key=key, limits=bounds.limits, fault=bounds.fault
        )
    if group.worker != worker:
        raise CorruptError("a group of another worker", run=bucket.url, key=key)
    return group

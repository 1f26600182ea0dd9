"""Encodes and decodes ``rollouts/``: one object for each finished group.

Token arrays are stored as little-endian bytes: ids int32, log-probabilities float32, versions
int32, loss mask uint8, with one entry per token.

An episode whose context was rebuilt while it ran, for example by a summary, is several trajectories
with one episode number: each has the prompt that the model actually read.

A group is refused at the least cost. Its arrays are read where they lie in the object. Its
declared sizes (trajectories, tokens, bytes of routes, turns of thinking) are compared with
`GroupLimits` before a list is made of it or a value is read. Arrays are copied last, once nothing
can refuse the group any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from deltawire.errors import CorruptError
from deltawire.wire.objects import FORMAT, decode_packed, encode_packed
from deltawire.wire.thinking import (
    NIL,
    StoredThinking,
    declared_thinking,
    decode_thinking,
    encode_thinking,
    thinking_fault,
)

MAX_GROUP_BYTES = 256 << 20
MAX_TRAJECTORIES = 4096
MAX_THINKING = 1 << 20
"""Turns of thinking, and ranges of inserted tokens, of all trajectories of a group."""
LIVE_TASK = "live"
"""Task and family of a learner's groups, whose answers are those of a lineage."""
MAX_PROBES = 64
MAX_NAME = 64
"""Characters of a worker's, a family's or a probe's name."""
MAX_TASK = 256
"""Characters of a task's identity."""

OVERLONG = frozenset({"length", "context"})
"""The finish reasons of truncated episodes: the token limit of a turn, or a full context."""

_Name = Annotated[str, Meta(max_length=MAX_NAME)]

THINKING_ENDS = ("answered", "forced", "cut", "stop_string", "limit", "stray_mark")
"""How a turn with a thinking budget may end."""


class _Reuse(msgspec.Struct, frozen=True, array_like=True):
    source: Annotated[int, Meta(ge=0, lt=4096)]
    count: Annotated[int, Meta(ge=1, lt=1 << 31)]


class _Better(msgspec.Struct, frozen=True, array_like=True):
    tokens: memoryview
    weight: Annotated[float, Meta(ge=0, le=1)]


class _Sequence(msgspec.Struct, frozen=True, array_like=True):
    """A trajectory, whose arrays are views of the object that it was decoded from."""

    tokens: memoryview
    logprobs: memoryview
    versions: memoryview
    mask: memoryview
    reward: float
    finish: Annotated[str, Meta(max_length=32)]
    episode: Annotated[int, Meta(ge=-1, lt=4096)] = -1
    prompt: memoryview = memoryview(b"")
    turns: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    cause: Annotated[str, Meta(max_length=512)] = ""
    probes: Annotated[dict[_Name, float], Meta(max_length=MAX_PROBES)] = {}
    routes: memoryview = memoryview(b"")
    thinking: msgspec.Raw = msgspec.Raw(NIL)
    reuse: _Reuse | None = None


class _PairedSequence(_Sequence, frozen=True, array_like=True):
    """A trajectory that may have a better answer. Those without one are stored as `_Sequence`."""

    better: _Better | None = None


class _Group(msgspec.Struct, frozen=True, kw_only=True):
    format: int = FORMAT
    worker: _Name
    nonce: _Name
    task: Annotated[str, Meta(max_length=MAX_TASK)]
    family: _Name = ""
    temperature: float
    prompt: memoryview
    sequences: Annotated[list[msgspec.Raw], Meta(min_length=1, max_length=MAX_TRAJECTORIES)]


@dataclass(frozen=True)
class GroupLimits:
    """The most that a group may declare, compared before any of it is decoded.

    ``tokens`` counts those of one trajectory without its prompt, ``prompt`` those of a prompt,
    ``routes`` the bytes of one trajectory's expert choices, and ``thinking`` the turns of thinking
    and the ranges of inserted tokens of all trajectories.
    """

    trajectories: int = MAX_TRAJECTORIES
    tokens: int = MAX_GROUP_BYTES
    prompt: int = MAX_GROUP_BYTES
    routes: int = MAX_GROUP_BYTES
    thinking: int = MAX_THINKING


@dataclass(frozen=True)
class Thinking:
    """The thinking of a trajectory: the ``budget`` of each turn in tokens; how many tokens each
    turn thought and how it ended (`THINKING_ENDS`); and the half-open ranges of tokens that were
    inserted to close the thinking by force."""

    budget: int
    turns: tuple[tuple[int, str], ...]
    forced: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Reuse:
    """The first ``count`` tokens of a trajectory, drawn once and shared with others.

    ``source`` is the index in the group of the trajectory that drew them. If that is the
    trajectory itself, the tokens are its thinking, which others may share.

    Example::

        Reuse(source=0, count=12)   # the first 12 tokens are those of the group's trajectory 0
    """

    source: int
    count: int


@dataclass(frozen=True)
class BetterAnswer:
    """The tokens of an answer that is better than the one that was drawn, to the same prompt, and
    the weight of the pair from 0 to 1. The model did not draw them: a user's edit, for example.

    Example::

        BetterAnswer(np.array([7, 9], np.int32), weight=1.0)
    """

    tokens_T: NDArray[np.int32]
    weight: float


@dataclass(frozen=True)
class Trajectory:
    """One completion of a group, after the group's shared prompt or a separate one.

    All arrays have length T. ``mask`` is 1 where the model drew the token and 0 where the
    environment wrote it; ``logprobs`` (nats) and ``versions`` are valid only where it is 1.

    Trajectories with the same ``episode`` are its segments, in order; each states the whole
    episode's reward. ``prompt`` is the trajectory's prompt, None if it is the group's. A ``cause``
    states why an episode failed through no fault of the model; such an episode is counted but not
    trained on. ``probes`` are checks that do not enter the reward; ``routes`` are the sampler's
    packed expert choices (`deltawire.parity`), empty if none were recorded. ``thinking`` is None
    without a budget. ``reuse`` names the trajectory that drew the first tokens, if that is another;
    their ``mask`` is then 0 here and the other arrays are its. ``better`` is a better answer, if
    one is known; only the only trajectory of an episode, all drawn, has one.
    """

    tokens_T: NDArray[np.int32]
    logprobs_T: NDArray[np.float32]
    versions_T: NDArray[np.int32]
    mask_T: NDArray[np.uint8]
    reward: float
    finish: str
    episode: int = -1
    prompt: NDArray[np.int32] | None = None
    turns: int = 1
    cause: str = ""
    probes: Mapping[str, float] = field(default_factory=dict)
    routes: bytes = b""
    thinking: Thinking | None = None
    reuse: Reuse | None = None
    better: BetterAnswer | None = None

    @property
    def is_better(self) -> bool:
        """Returns whether it is the better answer of its episode, as training appends it."""
        return self.better is not None and not self.mask_T.any()

    @property
    def turn_mask(self) -> NDArray[np.uint8]:
        """The mask with 1 also where thinking was closed by force: 1 throughout each turn of the
        model."""
        if self.thinking is None or not self.thinking.forced:
            return self.mask_T
        mask_T = self.mask_T.copy()
        for start, end in self.thinking.forced:
            mask_T[start:end] = 1
        return mask_T


@dataclass(frozen=True)
class Group:
    """The completions sampled for one prompt: the unit of advantage and of storage.

    ``family`` names the kind of task, so that statistics can be kept per kind.
    """

    worker: str
    nonce: str
    task: str
    temperature: float
    prompt: NDArray[np.int32]
    trajectories: list[Trajectory]
    family: str = ""

    def prompt_of(self, trajectory: Trajectory) -> NDArray[np.int32]:
        """Returns the prompt of one of its trajectories."""
        return self.prompt if trajectory.prompt is None else trajectory.prompt

    def whole(self, place: int) -> Trajectory:
        """Returns the trajectory at ``place`` as if it had drawn its reused tokens itself."""
        t = self.trajectories[place]
        if t.reuse is None or t.reuse.source == place:
            return t
        count, mask_T = t.reuse.count, t.mask_T.copy()
        mask_T[:count] = self.trajectories[t.reuse.source].mask_T[:count]
        return replace(t, mask_T=mask_T, reuse=None)

    @property
    def episodes(self) -> list[int]:
        """Returns each trajectory's episode, numbered from 0 in order of appearance; a trajectory
        that names no episode counts as a separate one."""
        numbers: dict[int, int] = {}
        return [
            numbers.setdefault(t.episode if t.episode >= 0 else -1 - i, len(numbers))
            for i, t in enumerate(self.trajectories)
        ]

    def trained(self) -> Iterator[tuple[int, int, Trajectory]]:
        """Yields (index, episode, trajectory) of every episode in which no segment states a cause:
        the ones that can be trained on.
        """
        episodes = self.episodes
        failed = {e for e, t in zip(episodes, self.trajectories, strict=True) if t.cause}
        for place, (episode, t) in enumerate(zip(episodes, self.trajectories, strict=True)):
            if episode not in failed:
                yield place, episode, t

    @property
    def overlong_episodes(self) -> set[int]:
        """The truncated episodes, as `episodes` numbers them: cut off by the token limit of a turn,
        or by a full context.
        """
        every = zip(self.episodes, self.trajectories, strict=True)
        return {episode for episode, t in every if t.finish in OVERLONG}

    @property
    def oldest_version(self) -> int:
        """The oldest version that drew any of its tokens; -1 if every episode failed before the
        first token."""
        return min((int(one.min()) for one in self._drawn_versions()), default=-1)

    @property
    def newest_version(self) -> int:
        """The newest version that drew any of its tokens; -1 if none was drawn."""
        return max((int(one.max()) for one in self._drawn_versions()), default=-1)

    def _drawn_versions(self) -> Iterator[np.ndarray]:
        """Yields the versions of each trajectory's drawn tokens, without empty ones."""
        for t in self.trajectories:
            versions_D = t.versions_T[t.mask_T == 1]
            if versions_D.size:
                yield versions_D

    @property
    def largest_token(self) -> int:
        """The largest token id in the group."""
        parts = [self.prompt, *(t.tokens_T for t in self.trajectories)]
        parts += [t.better.tokens_T for t in self.trajectories if t.better is not None]
        parts += [t.prompt for t in self.trajectories if t.prompt is not None]
        return max(int(part.max(initial=0)) for part in parts)

    @property
    def tokens(self) -> int:
        """Returns how many tokens the model drew."""
        return sum(int(t.mask_T.sum()) for t in self.trajectories)


def encode_group(group: Group) -> bytes:
    """Encodes the object stored at ``rollouts/<worker>/<sequence>``."""
    sequences = [_encoded(t) for t in group.trajectories]
    return encode_packed(
        _Group(
            worker=group.worker,
            nonce=group.nonce,
            task=group.task,
            family=group.family,
            temperature=group.temperature,
            prompt=_view(group.prompt, "<i4"),
            sequences=sequences,
        )
    )


def _encoded(t: Trajectory) -> msgspec.Raw:
    """Encodes a trajectory; one without a better answer has the bytes of earlier releases."""
    members = (
        _view(t.tokens_T, "<i4"),
        _view(t.logprobs_T, "<f4"),
        _view(t.versions_T, "<i4"),
        _view(t.mask_T, "u1"),
        float(t.reward),
        t.finish,
        t.episode,
        memoryview(b"") if t.prompt is None else _view(t.prompt, "<i4"),
        t.turns,
        t.cause,
        {name: float(value) for name, value in t.probes.items()},
        memoryview(t.routes),
        msgspec.Raw(NIL)
        if t.thinking is None
        else encode_thinking(t.thinking.budget, t.thinking.turns, t.thinking.forced),
        None if t.reuse is None else _Reuse(t.reuse.source, t.reuse.count),
    )
    if t.better is None:
        return msgspec.Raw(encode_packed(_Sequence(*members)))
    better = _Better(_view(t.better.tokens_T, "<i4"), float(t.better.weight))
    return msgspec.Raw(encode_packed(_PairedSequence(*members, better)))


def decode_group(
    data: bytes,
    *,
    run: str,
    key: str,
    limits: GroupLimits = GroupLimits(),
    fault: Callable[[Group], str] = lambda _: "",
) -> Group:
    """Decodes a group and validates its arrays.

    Raises `CorruptError` if a trajectory's arrays differ in length, for a trajectory without a
    drawn token and without a cause, log-probabilities that are not finite or are above 0, a
    negative token or version, a reward or probe that is not finite, segments of one episode that
    state different rewards, thinking that contradicts the tokens, and a temperature that is not
    finite and above 0. Raises `RefusedGroupError` for a sound group that declares more than
    ``limits``, or in which ``fault`` finds one.
    """
    raw = decode_packed(data, _Group, run=run, key=key)

    def corrupt(reason: str) -> None:
        if reason:
            raise CorruptError(f"group: {reason}", run=run, key=key)

    def refuse(reason: str) -> None:
        if reason:
            raise RefusedGroupError(raw.nonce, reason, run=run, key=key)

    corrupt(_head_fault(raw))
    refuse(_head_excess(raw, limits))
    sequences, thoughts = [], limits.thinking
    for one in raw.sequences:
        sequence = decode_packed(memoryview(one), _PairedSequence, run=run, key=key)
        corrupt(_length_fault(sequence))
        refuse(_excess(sequence, limits))
        thoughts -= declared_thinking(sequence.thinking, run=run, key=key)
        if thoughts < 0:
            refuse(f"more than {limits.thinking} turns of thinking and ranges of inserted tokens")
        sequences.append(sequence)
    trajectories = []
    for sequence in sequences:
        thinking = decode_thinking(sequence.thinking, run=run, key=key)
        corrupt(_sequence_fault(sequence, thinking))
        trajectories.append(_trajectory(sequence, thinking))
    prompt = np.frombuffer(raw.prompt, "<i4")
    group = Group(
        raw.worker, raw.nonce, raw.task, raw.temperature, prompt, trajectories, raw.family
    )
    corrupt(_group_fault(group))
    refuse(fault(group))
    return _owning(group)


class RefusedGroupError(CorruptError):
    """A group that is whole and exceeds what its run allows; ``nonce`` says who was granted it."""

    def __init__(self, nonce: str, message: str, *, run: str, key: str) -> None:
        super().__init__(message, run=run, key=key)
        self.nonce = nonce


def _head_fault(raw: _Group) -> str:
    if raw.format != FORMAT:
        return f"format {raw.format}"
    if not raw.prompt or len(raw.prompt) % 4:
        return "a prompt is not a whole number of tokens"
    if not (np.isfinite(raw.temperature) and raw.temperature > 0):
        return f"temperature {raw.temperature}"
    return ""


def _head_excess(raw: _Group, limits: GroupLimits) -> str:
    if len(raw.sequences) > limits.trajectories:
        return f"more than {limits.trajectories} trajectories"
    if len(raw.prompt) > 4 * limits.prompt:
        return f"a prompt of more than {limits.prompt} tokens"
    return ""


def _length_fault(sequence: _PairedSequence) -> str:
    count = len(sequence.mask)
    if {len(sequence.tokens), len(sequence.logprobs), len(sequence.versions)} != {4 * count}:
        return "arrays that differ in length"
    if sequence.better is not None and len(sequence.better.tokens) % 4:
        return "a better answer that is not tokens"
    return "a prompt that is not tokens" if len(sequence.prompt) % 4 else ""


def _excess(sequence: _PairedSequence, limits: GroupLimits) -> str:
    better = 0 if sequence.better is None else len(sequence.better.tokens)
    if max(len(sequence.mask), better // 4) > limits.tokens:
        return f"a sequence of more than {limits.tokens} tokens"
    if len(sequence.prompt) > 4 * limits.prompt:
        return f"a prompt of more than {limits.prompt} tokens"
    if len(sequence.routes) > limits.routes:
        return f"{len(sequence.routes)} bytes of expert choices, beyond {limits.routes}"
    return ""


def _trajectory(sequence: _PairedSequence, thinking: StoredThinking | None) -> Trajectory:
    """The trajectory, whose arrays are views of the object."""
    return Trajectory(
        np.frombuffer(sequence.tokens, "<i4"),
        np.frombuffer(sequence.logprobs, "<f4"),
        np.frombuffer(sequence.versions, "<i4"),
        np.frombuffer(sequence.mask, "u1"),
        sequence.reward,
        sequence.finish,
        sequence.episode,
        np.frombuffer(sequence.prompt, "<i4") if sequence.prompt else None,
        sequence.turns,
        sequence.cause,
        sequence.probes,
        sequence.routes,  # type: ignore[arg-type]
        _read_thinking(thinking),
        None if sequence.reuse is None else Reuse(sequence.reuse.source, sequence.reuse.count),
        None
        if sequence.better is None
        else BetterAnswer(np.frombuffer(sequence.better.tokens, "<i4"), sequence.better.weight),
    )


def _owning(group: Group) -> Group:
    """A copy of a group that does not hold the object that it was decoded from."""
    return replace(
        group,
        prompt=_copied(group.prompt),
        trajectories=[
            replace(
                t,
                tokens_T=_copied(t.tokens_T),
                logprobs_T=_copied(t.logprobs_T),
                versions_T=_copied(t.versions_T),
                mask_T=_copied(t.mask_T),
                prompt=None if t.prompt is None else _copied(t.prompt),
                routes=bytes(t.routes),
                better=None
                if t.better is None
                else replace(t.better, tokens_T=_copied(t.better.tokens_T)),
            )
            for t in group.trajectories
        ],
    )


def _copied(array: NDArray[Any]) -> NDArray[Any]:
    return np.frombuffer(array.tobytes(), array.dtype)


def _view(array: NDArray[Any], dtype: str) -> memoryview:
    return memoryview(array.astype(dtype).tobytes())


def _group_fault(group: Group) -> str:
    if (group.prompt < 0).any():
        return "a negative token"
    rewards: dict[int, float] = {}
    first: dict[int, int] = {}
    for place, t in enumerate(group.trajectories):
        if t.episode >= 0 and rewards.setdefault(t.episode, t.reward) != t.reward:
            return f"the segments state different rewards for episode {t.episode}"
        first.setdefault(t.episode, place)
    same = _SamePrompts(group)
    faults = (_reuse_fault(group, place, first, same) for place in range(len(group.trajectories)))
    return next(filter(None, faults), "") or _pair_fault(group)


def _pair_fault(group: Group) -> str:
    counts = Counter(t.episode for t in group.trajectories)
    for t in group.trajectories:
        if t.better is None:
            continue
        if t.cause or t.episode < 0 or counts[t.episode] > 1 or not t.mask_T.all():
            return "a better answer of an episode that is not one drawn answer"
        if not len(t.better.tokens_T) or (t.better.tokens_T < 0).any():
            return "a better answer without tokens, or with a negative one"
    return ""


class _SamePrompts:
    """Compares prompts of two trajectories, each with the group's at most once: otherwise some
    thousand short trajectories could each ask for the comparison of a long prompt."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._as_group: dict[int, bool] = {}

    def __call__(self, place: int, source: int) -> bool:
        own, other = (self._group.trajectories[n].prompt for n in (place, source))
        if own is not None and other is not None:
            return np.array_equal(own, other)
        return all(self._is_groups(n) for n in (place, source))

    def _is_groups(self, place: int) -> bool:
        prompt = self._group.trajectories[place].prompt
        if place not in self._as_group:
            same = prompt is None or np.array_equal(prompt, self._group.prompt)
            self._as_group[place] = same
        return self._as_group[place]


def _reuse_fault(
    group: Group, place: int, first: Mapping[int, int], same_prompt: _SamePrompts
) -> str:
    """``first`` has the first trajectory of each episode."""
    t = group.trajectories[place]
    if t.reuse is None:
        return ""
    source, count = t.reuse.source, t.reuse.count
    if source == place:
        return "" if count <= len(t.tokens_T) else "a shared thought longer than its trajectory"
    if source > place or count >= len(t.tokens_T):
        return "reused tokens of a later trajectory, or with none after them"
    other = group.trajectories[source]
    if other.cause or (other.reuse is not None and other.reuse.source != source):
        return "tokens reused from an episode that failed, or that did not draw them"
    if any(one.episode >= 0 and first[one.episode] < n for n, one in ((place, t), (source, other))):
        return "reused tokens in a later segment of an episode"
    if not same_prompt(place, source) or t.mask_T[:count].any():
        return "reused tokens after another prompt, or with mask 1"
    for name in ("tokens_T", "logprobs_T", "versions_T"):
        if not np.array_equal(getattr(t, name)[:count], getattr(other, name)[:count]):
            return "reused tokens that are not those of their source"
    return ""


def _sequence_fault(sequence: _PairedSequence, thinking: StoredThinking | None) -> str:
    mask = np.frombuffer(sequence.mask, "u1")
    if mask.max(initial=0) != 1 and not (sequence.cause and not mask.any()):
        return "a trajectory has no token that the model drew"
    if (np.frombuffer(sequence.tokens, "<i4") < 0).any():
        return "a negative token"
    drawn = mask == 1
    logprobs = np.frombuffer(sequence.logprobs, "<f4")[drawn]
    if not np.isfinite(logprobs).all() or (logprobs > 1e-3).any():
        return "a log-probability is not finite or is above 0"
    if (np.frombuffer(sequence.versions, "<i4")[drawn] < 0).any():
        return "a negative version"
    if not np.isfinite([sequence.reward, *sequence.probes.values()]).all():
        return "a reward or probe that is not finite"
    if (np.frombuffer(sequence.prompt, "<i4") < 0).any():
        return "a prompt that is not tokens"
    if thinking is not None:
        reused = 0 if sequence.reuse is None else sequence.reuse.count
        return thinking_fault(thinking, mask, sequence.turns, reused)
    return ""


def _read_thinking(raw: StoredThinking | None) -> Thinking | None:
    if raw is None:
        return None
    ranges = np.frombuffer(raw.forced, "<i4").reshape(-1, 2).tolist()
    return Thinking(
        raw.budget,
        tuple((turn.thought, turn.ended) for turn in raw.turns),
        tuple((start, end) for start, end in ranges),
    )

"""`Monitor` compares rewards with probes, group by group, for each family of tasks.

Its state is a small function of the groups and their order. The bucket holds it as ``probes.json``,
for the views and for a trainer that resumes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from deltawire.config import ProbesConfig
from deltawire.reward_monitor.evidence import BETS, advance, evidence, threshold
from deltawire.wire.objects import FORMAT
from deltawire.wire.payload import Index
from deltawire.wire.rollouts import Group

ALARM = "alarm."
"""Prefix of probes that are 0 if all is well and 1 if it is not. Any other probe is a second
opinion of the reward, on its scale."""
ALL = "*"
"""The name for all families together."""
MAX_STREAMS = 1024
MAX_EXAMPLES = 5
MAX_POINTS = 64
MAX_LEFT_OUT = 16
"""The most workers of a stream whose groups are left out in turn."""

_Wealth = Annotated[list[float], Meta(min_length=len(BETS), max_length=len(BETS))]
_Text = Annotated[str, Meta(max_length=64)]
_Share = Annotated[float, Meta(gt=0, lt=1)]


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout to look at: ``rollouts/<worker>/<sequence>``, and one of its episodes; or a served
    ``answer`` by its id, in ``live/captures/<worker>/<sequence>``."""

    worker: _Text
    sequence: Index
    episode: Index
    task: Annotated[str, Meta(max_length=256)]
    reward: float
    probe: float
    version: Index
    answer: Annotated[str, Meta(max_length=32)] = ""

    @property
    def name(self) -> str:
        """The name of the rollout in other parts of deltawire."""
        return f"{self.worker}/{self.sequence}#{self.episode}"


class Point(msgspec.Struct, kw_only=True):
    """Sums over consecutive groups, the last of them trained into ``version``."""

    version: Index
    groups: int = 0
    reward: float = 0.0
    probe: float = 0.0
    excess: float = 0.0


class Remaining(msgspec.Struct, kw_only=True):
    """The evidence of a stream without the groups of one worker."""

    groups: Annotated[int, Meta(ge=0)]
    wealth: _Wealth


class ProbeStream(msgspec.Struct, kw_only=True):
    """One probe in one family. ``number`` is its position in the order of opening.

    ``without`` holds the evidence that remains without each of the workers whose groups have shown
    an excess, at most `MAX_LEFT_OUT`.

    ``flagged_at`` is the version whose step flagged it, permanently, and ``flagged_after`` the
    number of its groups until then. ``points`` hold ``width`` groups each, except for the last.
    """

    family: _Text
    probe: _Text
    number: Annotated[int, Meta(ge=1)]
    groups: Annotated[int, Meta(ge=0)] = 0
    reward: float = 0.0
    value: float = 0.0
    excess: float = 0.0
    wealth: _Wealth = msgspec.field(default_factory=lambda: [0.0] * len(BETS))
    without: Annotated[dict[_Text, Remaining], Meta(max_length=MAX_LEFT_OUT)] = {}
    flagged_at: Index | None = None
    flagged_after: int | None = None
    examples: Annotated[list[Example], Meta(max_length=MAX_EXAMPLES)] = []
    width: Annotated[int, Meta(ge=1)] = 1
    points: Annotated[list[Point], Meta(max_length=MAX_POINTS)] = []

    @property
    def evidence(self) -> float:
        """The evidence against the null hypothesis (`evidence`)."""
        return evidence(self.wealth, self.groups)

    @property
    def evidence_without_any_worker(self) -> float:
        """The least evidence that remains if the groups of one worker are left out."""
        rest = (evidence(one.wealth, one.groups) for one in self.without.values())
        return min(rest, default=self.evidence)

    @property
    def means(self) -> tuple[float, float, float]:
        """Reward, probe, excess, over all groups."""
        count = max(1, self.groups)
        return self.reward / count, self.value / count, self.excess / count


class ProbeState(msgspec.Struct, kw_only=True):
    """``probes.json``: all streams, as of the groups of the steps up to ``version``.

    ``untracked`` counts what was seen after `MAX_STREAMS` streams were open. ``workers`` are the
    first two that delivered groups.
    """

    format: int = FORMAT
    version: Index = 0
    since: Index = 0
    false_alarm: _Share = 0.01
    tolerance: _Share = 0.05
    streams: Annotated[list[ProbeStream], Meta(max_length=MAX_STREAMS)] = []
    untracked: Annotated[int, Meta(ge=0)] = 0
    workers: Annotated[list[_Text], Meta(max_length=2)] = []

    @property
    def flagged(self) -> list[ProbeStream]:
        """Returns the streams that are flagged."""
        return [stream for stream in self.streams if stream.flagged_at is not None]


def excess(name: str, reward: float, probe: float, scale: float) -> float:
    """The excess of a reward over a probe, 0 to 1.

    For a second opinion it is the difference; for an alarm, the reward that was earned while it was
    on, since behavior that earns nothing is not learned. A reward below the probe has no excess: it
    must not offset another that is above.
    """
    if name.startswith(ALARM):
        return min(max(reward / scale, 0.0), 1.0) * min(max(probe, 0.0), 1.0)
    return min(max((reward - probe) / scale, 0.0), 1.0)


class _Place(NamedTuple):
    """Where the numbers of a stream come from."""

    group: Group
    sequence: int
    version: int
    answer: str


class Monitor:
    """Adds groups to a `ProbeState`, in the order in which they are trained on.

    Example::

        monitor = Monitor(ProbesConfig())
        flagged = monitor.add(group, sequence, version=7)
    """

    def __init__(self, config: ProbesConfig, state: ProbeState | None = None) -> None:
        self._config = config
        fresh = ProbeState(false_alarm=config.false_alarm, tolerance=config.tolerance)
        self.state = state if state is not None else fresh
        self._streams = {(s.family, s.probe): s for s in self.state.streams}

    def add(
        self, group: Group, sequence: int, *, version: int, answer: str = ""
    ) -> list[ProbeStream]:
        """Adds a group that the step into ``version`` trains on, or a served ``answer`` that
        ``version`` drew; returns the streams that it flags.

        Where several workers deliver, a stream is flagged only if its evidence suffices without any
        one of them: a worker that forges its groups must not end the run of the others.
        """
        found: list[ProbeStream] = []
        known, worker = self.state.workers, group.worker[:64]
        if len(known) < 2 and worker not in known:
            self.state.workers = [*known, worker]
        episodes = list(_episodes(group))
        for name in sorted({name for _, _, probes in episodes for name in probes}):
            rows = [(e, reward, probes[name]) for e, reward, probes in episodes if name in probes]
            for family in (ALL, group.family[:64]):
                stream = self._stream(family, name)
                place = _Place(group, sequence, version, answer)
                if stream is not None and self._update(stream, rows, place):
                    found.append(stream)
        return found

    def withholds(self, group: Group, sequence: int) -> bool:
        """Returns whether a new group is left out, to down-weight its family.

        The choice depends only on the group's name, so that the probe does not become a reward:
        groups that cheat and groups that do not are left out alike.
        """
        if self._config.action != "downweight" or not self.suspect(group.family[:64]):
            return False
        name = f"{group.worker}/{sequence}".encode()
        place = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
        return place / 2**64 >= self._config.keep

    def suspect(self, family: str) -> bool:
        """Returns whether a family is flagged, or all together are and its excess is too large."""
        everywhere = {s.probe for s in self.state.flagged if s.family == ALL}
        return any(
            stream.flagged_at is not None
            or (stream.probe in everywhere and stream.means[2] > self._config.tolerance)
            for stream in self.state.streams
            if stream.family == family
        )

    def _stream(self, family: str, probe: str) -> ProbeStream | None:
        stream = self._streams.get((family, probe))
        if stream is None:
            if len(self._streams) >= MAX_STREAMS:
                self.state.untracked += 1
                return None
            stream = ProbeStream(family=family, probe=probe, number=len(self._streams) + 1)
            self._streams[family, probe] = stream
            self.state.streams.append(stream)
        return stream

    def _update(
        self,
        stream: ProbeStream,
        rows: list[tuple[int, float, float]],
        place: _Place,
    ) -> bool:
        scale = self._config.reward_scale
        excesses = [excess(stream.probe, reward, probe, scale) for _, reward, probe in rows]
        y = sum(excesses) / len(rows)
        reward = sum(reward for _, reward, _ in rows) / len(rows)
        value = sum(probe for _, _, probe in rows) / len(rows)
        stream.groups += 1
        stream.reward += reward
        stream.value += value
        stream.excess += y
        self._leave_out(stream, place.group.worker[:64], y)
        stream.wealth = advance(stream.wealth, stream.groups, y, self._config.tolerance)
        _plot(stream, Point(version=place.version, groups=1, reward=reward, probe=value, excess=y))
        worst = max(range(len(rows)), key=lambda i: excesses[i])
        if excesses[worst] > self._config.tolerance:
            episode, earned, said = rows[worst]
            example = Example(
                worker=place.group.worker[:64],
                sequence=place.sequence,
                episode=episode,
                task=place.group.task[:256],
                reward=earned,
                probe=said,
                version=place.version,
                answer=place.answer,
            )
            stream.examples = [*stream.examples, example][-MAX_EXAMPLES:]
        limit = threshold(self._config.false_alarm, stream.number)
        least = stream.evidence
        if len(self.state.workers) > 1:
            least = min(least, stream.evidence_without_any_worker)
        if stream.flagged_at is not None or least < limit:
            return False
        stream.flagged_at, stream.flagged_after = place.version, stream.groups
        return True

    def _leave_out(self, stream: ProbeStream, worker: str, y: float) -> None:
        """Adds a group to the evidence that remains without each worker but its own.

        Called before the stream's own evidence counts the group. A worker is left out from its
        first excess on: groups without one only lower the evidence.
        """
        tolerance = self._config.tolerance
        rest = {
            name: kept if name == worker else _with(kept, y, tolerance)
            for name, kept in stream.without.items()
        }
        if worker not in rest and y > tolerance:
            if len(rest) == MAX_LEFT_OUT:
                # The worker that matters least: most evidence remains without it.
                del rest[max(rest, key=lambda name: evidence(rest[name].wealth, rest[name].groups))]
            rest[worker] = Remaining(groups=stream.groups - 1, wealth=list(stream.wealth))
        stream.without = rest


def _with(kept: Remaining, y: float, tolerance: float) -> Remaining:
    count = kept.groups + 1
    return Remaining(groups=count, wealth=advance(kept.wealth, count, y, tolerance))


def _episodes(group: Group) -> Iterator[tuple[int, float, dict[str, float]]]:
    """(episode, reward, probes) of each episode that is trained on, once."""
    failed = {e for e, t in zip(group.episodes, group.trajectories, strict=True) if t.cause}
    seen: set[int] = set()
    for episode, trajectory in zip(group.episodes, group.trajectories, strict=True):
        if episode not in failed and episode not in seen:
            seen.add(episode)
            yield episode, trajectory.reward, dict(trajectory.probes)


def _plot(stream: ProbeStream, point: Point) -> None:
    """Adds one group to the curve; when it is full, neighbors are joined."""
    points = stream.points
    if points and points[-1].groups < stream.width:
        points[-1] = _joined(points[-1], point)
        return
    if len(points) == MAX_POINTS:
        stream.points = points = [
            _joined(a, b) for a, b in zip(points[::2], points[1::2], strict=True)
        ]
        stream.width *= 2
    points.append(point)


def _joined(first: Point, second: Point) -> Point:
    return Point(
        version=second.version,
        groups=first.groups + second.groups,
        reward=first.reward + second.reward,
        probe=first.probe + second.probe,
        excess=first.excess + second.excess,
    )

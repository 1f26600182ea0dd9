"""The trainer's use of the probes: observe groups, record events, store the state, and act."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from deltawire.config import ProbesConfig
from deltawire.errors import CorruptError, DeltawireError, RetryError, StoppedError
from deltawire.events import Diverged, Event
from deltawire.reward_monitor.monitor import ALL, Example, Monitor, Point, ProbeState, ProbeStream
from deltawire.store import Bucket
from deltawire.wire import keys
from deltawire.wire.objects import FORMAT, decode_json, encode_json
from deltawire.wire.rollouts import Group

MAX_STATE_BYTES = 32 << 20
WRITE_EVERY_S = 5.0
LOOK_BACK = 64
"""Steps that a trainer reads again if it finds no state of the probes, or one with other
settings."""


class StreamFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One `ProbeStream` for views and programs: ``reward``, ``value`` (the probe's) and ``excess``
    are means over all of its ``groups``; points hold sums over up to ``width`` groups each."""

    family: str
    probe: str
    number: int
    groups: int
    reward: float
    value: float
    excess: float
    evidence: float
    flagged_at: int | None
    flagged_after: int | None
    examples: list[Example]
    width: int
    points: list[Point]


class ProbeFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A `ProbeState` for views and programs; ``flagged`` is the number of flagged streams."""

    version: int
    since: int
    false_alarm: float
    tolerance: float
    untracked: int
    flagged: int
    streams: list[StreamFigures]


class Numbered(Protocol):
    """A group and its sequence, as the pool hands them out."""

    @property
    def sequence(self) -> int:
        """Its number among its worker's groups."""
        ...

    @property
    def group(self) -> Group:
        """The group."""
        ...


def read_probes(bucket: Bucket) -> ProbeState | None:
    """Reads the probes of a run; None if it has none. Raises `CorruptError`."""
    data = bucket.get(keys.PROBES, limit=MAX_STATE_BYTES)
    if data is None:
        return None
    state = decode_json(data, ProbeState, run=bucket.url, key=keys.PROBES)
    names = {(stream.family, stream.probe) for stream in state.streams}
    numbers = [stream.number for stream in state.streams]
    if state.format != FORMAT or numbers != list(range(1, len(names) + 1)):
        raise CorruptError(
            "the streams of the probes contradict each other", run=bucket.url, key=keys.PROBES
        )
    return state


class ProbeWatch:
    """Observes the groups of the trainer's steps.

    ``again(version)`` returns the groups of an earlier step, or None if they are gone; it is called
    for the steps between the state in the bucket and ``version``, the newest one.
    """

    def __init__(
        self,
        bucket: Bucket,
        config: ProbesConfig,
        *,
        version: int,
        again: Callable[[int], Sequence[Numbered] | None],
        record: Callable[[Event], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bucket = bucket
        self._config = config
        self._record = record
        self._clock = clock
        self._written_at = clock()
        self._waiting: bytes | None = None
        self.monitor = self._restore(version, again)
        if config.action == "stop" and self.monitor.state.flagged:
            raise self._stopping(self.monitor.state.flagged[0])

    def _restore(self, version: int, again: Callable[[int], Sequence[Numbered] | None]) -> Monitor:
        """Restores the monitor at ``version``: from the bucket, and the groups of later steps."""
        try:
            state = read_probes(self._bucket)
        except CorruptError:
            state = None
        ours = (self._config.false_alarm, self._config.tolerance)
        if state is not None and (
            state.version > version or (state.false_alarm, state.tolerance) != ours
        ):
            state = None
        monitor = Monitor(self._config, state)
        if state is None:
            monitor.state.since = monitor.state.version = max(0, version - LOOK_BACK)
        for step in range(monitor.state.version + 1, version + 1):
            try:
                groups = again(step)
            except RetryError:
                raise
            except DeltawireError:
                groups = None
            for one in groups or ():
                monitor.add(one.group, one.sequence, version=step)
            monitor.state.version = step
        return monitor

    def withholds(self, group: Group, sequence: int) -> bool:
        """Calls `Monitor.withholds`; the rollout buffer asks here."""
        return self.monitor.withholds(group, sequence)

    def observe(self, taken: Sequence[Numbered], *, version: int) -> None:
        """Observes the groups of the step into ``version``, after it was given to the publisher.

        Records each divergence. The stored state is the one before these groups, whose step is
        committed by now. Raises `StoppedError` if the configuration says to stop.
        """
        found: list[ProbeStream] = []
        due = self._clock() - self._written_at >= WRITE_EVERY_S
        if due and self._waiting is not None:
            self._store(self._waiting)
        for one in taken:
            found += self.monitor.add(one.group, one.sequence, version=version)
        self.monitor.state.version = version
        for stream in found:
            self._record(diverged(stream))
        has_any = bool(self.monitor.state.streams)
        self._waiting = encode_json(self.monitor.state) if has_any else None
        if found and self._config.action == "stop":
            raise self._stopping(found[0])

    def _stopping(self, stream: ProbeStream) -> StoppedError:
        names = ", ".join(example.name for example in stream.examples[-3:])
        return StoppedError(
            f"{describe_flag(stream)}, for example in {names}",
            hint="inspect it with deltawire probes; to continue anyway, change probes.action",
            run=self._bucket.url,
            version=stream.flagged_at,
        )

    def close(self) -> None:
        """Stores the newest state; its step must be committed."""
        if self._waiting is not None:
            self._store(self._waiting)

    def _store(self, data: bytes) -> None:
        """Stores the state; if the store does not answer, it is tried again later."""
        self._written_at = self._clock()
        try:
            self._bucket.put(keys.PROBES, data)
        except RetryError:
            return
        self._waiting = None


def describe_flag(stream: ProbeStream) -> str:
    """A flag in words."""
    family = f"family {stream.family or 'unnamed'!r}"
    where = "all tasks together" if stream.family == ALL else family
    return f"reward has diverged from probe {stream.probe!r} in {where}"


def flagged_in(state: ProbeState | None) -> list[ProbeStream]:
    """The flagged streams."""
    return state.flagged if state is not None else []


def excesses(state: ProbeState | None) -> dict[str, float]:
    """Mean excess by "family probe", as a share of the reward's scale."""
    streams = state.streams if state is not None else []
    return {
        f"{'all' if s.family == ALL else s.family or 'unnamed'} {s.probe}": s.means[2]
        for s in streams
    }


def diverged(stream: ProbeStream) -> Diverged:
    """The event of a flagged stream."""
    reward, probe, excess = stream.means
    assert stream.flagged_at is not None
    return Diverged(
        process="trainer",
        at=time.time(),
        version=stream.flagged_at,
        family=stream.family,
        probe=stream.probe,
        groups=stream.groups,
        reward=reward,
        value=probe,
        excess=excess,
        evidence=stream.evidence,
        examples=[example.name for example in stream.examples],
    )


def figures_of(state: ProbeState) -> ProbeFigures:
    """The means and evidence of a state, without its bets."""
    rows = []
    for stream in state.streams:
        reward, value, excess = stream.means
        row = StreamFigures(
            family=stream.family,
            probe=stream.probe,
            number=stream.number,
            groups=stream.groups,
            reward=reward,
            value=value,
            excess=excess,
            evidence=stream.evidence,
            flagged_at=stream.flagged_at,
            flagged_after=stream.flagged_after,
            examples=stream.examples,
            width=stream.width,
            points=stream.points,
        )
        rows.append(row)
    return ProbeFigures(
        version=state.version,
        since=state.since,
        false_alarm=state.false_alarm,
        tolerance=state.tolerance,
        untracked=state.untracked,
        flagged=len(state.flagged),
        streams=rows,
    )

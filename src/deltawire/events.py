"""The run record: small typed events, appended as JSON lines, from which every view is made.

Each process appends to its own series of objects, so that no two writers ever meet. Times are
seconds since the epoch; views that compare processes trust the machines' clocks to that extent.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from deltawire.errors import RetryError

Role = Literal["supervisor", "trainer", "worker", "evaluator", "warm-start"]
Activity = Literal["start", "wait", "sample", "train", "publish", "swap", "evaluate", "checkpoint"]

MAX_LINE = 64 * 1024


class _Event(msgspec.Struct, tag_field="event", frozen=True, kw_only=True):
    process: str
    """The process's name in the run: ``trainer``, ``evaluator`` or a worker's id."""


class Life(_Event, tag="life", frozen=True, kw_only=True):
    """A process started, stopped, died, or was restarted."""

    at: float
    role: Role
    what: Literal["started", "stopped", "died", "restarted"]
    supervised: bool = True
    pid: int = 0
    host: str = ""
    detail: str = ""


class Span(_Event, tag="span", frozen=True, kw_only=True):
    """What a process was doing from ``start`` to ``end``, in seconds since the epoch."""

    activity: Activity
    start: float
    end: float


class FamilyCounts(msgspec.Struct, frozen=True, array_like=True):
    """Of one family of tasks: groups trained on and too old, and the tokens drawn in them."""

    trained: int = 0
    trained_tokens: int = 0
    dropped: int = 0
    dropped_tokens: int = 0


class Step(_Event, tag="step", frozen=True, kw_only=True):
    """One optimizer step: it consumed groups and made ``version``.

    ``staleness`` is one integer a consumed group: the version trained from, minus the oldest
    version that generated one of its tokens. ``queued``, group by group, is the part of it that
    passed after the group's newest token was drawn; the rest passed while it was in flight.
    ``k3`` is the mean k3 estimate of the divergence between sampler and trainer, before the step,
    in nats a token. ``clipped`` and ``rejected`` are shares of the tokens, ``kl`` is the mean
    penalty (`deltawire.train.loss.PolicyLoss`). ``loss``, ``grad_norm`` and ``kl`` are None where
    they came out as no finite number; without a ``grad_norm`` the step moved no weight.
    """

    at: float
    version: int
    groups: int
    dropped: int
    reward_mean: float
    loss: float | None
    grad_norm: float | None
    k3: float
    ratio_max: float
    clipped: float
    staleness: list[int]
    tokens: int
    seconds: float
    workers: dict[str, int] = {}
    queued: list[int] = []
    rejected: float = 0.0
    kl: float | None = 0.0
    families: dict[str, FamilyCounts] = {}
    causes: dict[str, int] = {}
    """Of the dropped groups."""
    failures: dict[str, int] = {}
    """Causes of failed episodes in trained groups."""


class Published(_Event, tag="published", frozen=True, kw_only=True):
    """A version was committed. ``blocked_ms`` is how long the trainer stood still for it."""

    at: float
    version: int
    bytes_delta: int
    bytes_full: int
    bytes_anchor: int
    changed: int
    elements: int
    blocked_ms: float
    encode_ms: float
    upload_ms: float


class Swapped(_Event, tag="swapped", frozen=True, kw_only=True):
    """A worker swapped a version into its serving weights, ``running`` sequences in flight."""

    at: float
    version: int
    running: int
    swap_ms: float
    prepare_ms: float


class Generated(_Event, tag="generated", frozen=True, kw_only=True):
    """A worker stored a finished group. ``failed`` of its trajectories are not trained on, and
    ``cause`` says why the first of them is not."""

    at: float
    sequence: int
    versions: list[int]
    reward_mean: float
    tokens: int
    failed: int = 0
    cause: str = ""


class Evaluated(_Event, tag="evaluated", frozen=True, kw_only=True):
    """Held-out accuracy of one version over ``problems`` problems: the share correct of
    ``samples`` answers each at the rollout's temperature, and of one greedy answer each."""

    at: float
    version: int
    accuracy: float
    greedy: float = 0.0
    samples: int = 1
    problems: int
    seconds: float


class Diverged(_Event, tag="diverged", frozen=True, kw_only=True):
    """Reward and a probe have come apart in a family of tasks (``*`` for all together).

    ``reward``, ``value`` (the probe's) and ``excess`` are means over the ``groups`` seen so far;
    ``examples`` name rollouts as worker/sequence#episode.
    """

    at: float
    version: int
    family: str
    probe: str
    groups: int
    reward: float
    value: float
    excess: float
    evidence: float
    examples: list[str] = []


class WarmStep(_Event, tag="warm_step", frozen=True, kw_only=True):
    """Progress of the supervised warm start; ``accuracy`` is on its own validation problems, and
    ``loss`` None where it came out as no finite number."""

    at: float
    step: int
    loss: float | None
    accuracy: float | None = None


class Gaps(msgspec.Struct, frozen=True, kw_only=True):
    """A `deltawire.parity.Divergence`, every number finite."""

    tokens: int
    k1: float
    k3: float
    k1_reverse: float
    k3_reverse: float
    k3_swapped: float
    mean_gap: float
    largest_gap: float
    ratio_max: float
    extreme_share: float
    effective_share: float


class Parity(_Event, tag="parity", frozen=True, kw_only=True):
    """How far sampler and trainer agreed on the batch that made ``version``, or would have.

    ``numeric`` is over tokens that the trained version itself drew, ``drift`` over all.
    ``flipped`` is the share of flipped expert choices in each expert layer. ``warnings`` and
    ``stopped`` name the thresholds that were crossed, ``masked`` the sequences taken out of the
    loss: worker, group and place in it.
    """

    at: float
    version: int
    numeric: Gaps
    drift: Gaps
    flipped: list[float] = []
    warnings: list[str] = []
    masked: list[str] = []
    stopped: list[str] = []


Event = (
    Life | Span | Step | Published | Swapped | Generated | Evaluated | WarmStep | Parity | Diverged
)

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Event)


def known(value: float) -> float | None:
    """A number as JSON has it, None for one that it has not: a line with such a one where a number
    must stand could not be read."""
    return value if math.isfinite(value) else None


def encode_lines(events: Iterable[Event]) -> bytes:
    """JSON lines, newline-terminated."""
    return b"".join(_encoder.encode(event) + b"\n" for event in events)


def decode_lines(data: bytes) -> list[Event]:
    """The events in ``data``; a line that is not one (a newer writer's, say) is passed over."""
    events: list[Event] = []
    for line in data.splitlines():
        if len(line) > MAX_LINE:
            continue
        try:
            events.append(_decoder.decode(line))
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            continue
    return events


class EventLog:
    """Collects a process's events and hands them on in segments.

    ``put(number, data)`` stores one segment of JSON lines; it is called from whichever thread
    records the event that fills a segment, or calls `flush`. If it raises `RetryError` the next
    flush stores the same segment again, to the byte, before a new one; other errors pass through.
    """

    def __init__(
        self,
        process: str,
        put: Callable[[int, bytes], None],
        *,
        every_s: float = 1.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.process = process
        self.now = clock
        self._put = put
        self._every_s = every_s
        self._pending: list[Event] = []
        self._unanswered = b""
        self._segment = 0
        self._flushed_at = clock()
        self._lock = threading.RLock()

    def record(self, event: Event) -> None:
        """Take an event; from time to time, store what has been taken."""
        with self._lock:
            self._pending.append(event)
            if self.now() - self._flushed_at >= self._every_s:
                self.flush()

    def span(self, activity: Activity, start: float, end: float | None = None) -> float:
        """Record that ``activity`` ran from ``start`` until ``end`` (now); returns the end.

        A span that continues the last pending one of the same activity is merged into it.
        """
        end = self.now() if end is None else end
        with self._lock:
            last = self._pending[-1] if self._pending else None
            if isinstance(last, Span) and last.activity == activity and start - last.end < 0.005:
                self._pending[-1] = msgspec.structs.replace(last, end=end)
                if end - self._flushed_at >= self._every_s:
                    self.flush()
            elif end > start:
                self.record(Span(process=self.process, activity=activity, start=start, end=end))
        return end

    def flush(self) -> None:
        """Store what is pending as one segment.

        One whose put was not answered comes first, as it was: it may be stored, and read already.
        """
        with self._lock:
            self._flushed_at = self.now()
            while self._unanswered or self._pending:
                if not self._unanswered:
                    self._unanswered = encode_lines(self._pending)
                    self._pending.clear()
                try:
                    self._put(self._segment, self._unanswered)
                except RetryError:
                    return
                self._segment += 1
                self._unanswered = b""

"""Records of what a run's processes did: typed events in JSON lines, from which views are made.

Each process appends to its own stream of objects, so no two writers share one. Times are seconds
since the epoch; views that compare processes rely on the machines' clocks to that extent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from deltawire.estimates import (
    BudgetScore,
    BudgetSetting,
    FamilyCounts,
    OffPolicyEstimate,
    SettingScore,
    UseGain,
)

Role = Literal["supervisor", "trainer", "worker", "evaluator", "reference", "warm-start"]
Activity = Literal["start", "wait", "sample", "train", "publish", "swap", "evaluate", "checkpoint"]

MAX_LINE = 64 * 1024
MAX_STEP_GROUPS = 1 << 20
"""The most groups of a step that a reader expands from counts."""
_LARGEST_EXPONENT = 700.0
"""The exponential of more is not a float."""


class _Event(msgspec.Struct, tag_field="event", frozen=True, kw_only=True):
    process: str
    """The process's name in the run: ``trainer``, ``evaluator`` or a worker's id."""
    written_by: ClassVar[frozenset[Role]] = frozenset()
    """The roles whose processes record events of this type; empty: every process does."""


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
    """A process's activity from ``start`` to ``end``, in seconds since the epoch."""

    activity: Activity
    start: float
    end: float


class Step(_Event, tag="step", frozen=True, kw_only=True):
    """One optimizer step: it consumed groups and made ``version``.

    ``staleness`` is one integer a consumed group: the version trained from, minus the oldest
    version that generated one of its tokens. ``queued``, group by group, is the part of it that
    passed after the group's newest token was drawn; the rest passed while it was in flight.
    ``k3`` is the mean k3 estimate of the divergence between sampler and trainer, before the step,
    in nats a token. ``clipped`` and ``rejected`` are shares of the tokens, ``kl`` is the mean
    penalty and ``entropy`` the mean entropy in nats, None if it was not computed
    (`deltawire.train.loss.PolicyLoss`); ``completion_length`` and the six fields after it are
    those of `deltawire.train.statistics.GroupStatistics`. ``pairs`` counts served answers with a
    better one, None in a run that does not train on pairs. ``loss``, ``grad_norm`` and ``kl`` are
    None if they were not finite; without a ``grad_norm`` the step changed no weight.
    """

    written_by: ClassVar[frozenset[Role]] = frozenset({"trainer"})
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
    entropy: float | None = None
    completion_length: float = 0.0
    truncated: float = 0.0
    reward_spread: float = 0.0
    zero_advantage: float = 0.0
    pairs: int | None = None
    thinking_length: float | None = None
    forced_share: float | None = None
    reused_length: float = 0.0
    families: dict[str, FamilyCounts] = {}
    causes: dict[str, int] = {}
    """Why groups were dropped, with counts."""
    failures: dict[str, int] = {}
    """Why episodes of trained groups failed, with counts."""
    ages: list[tuple[int, int, int]] = []
    """In a line that would be too long, ``staleness`` and ``queued`` as counts of equal pairs:
    (staleness, queued, groups). Readers expand them; the order of the groups is lost."""
    left_out: dict[str, int] = {}
    """By field, the number of entries that were left out of a line that would be too long."""


class Allocated(_Event, tag="allocated", frozen=True, kw_only=True):
    """Prompts that allocation decided since the previous step, which made ``version``.

    Of the ``judged`` prompts, ``trained`` were trained on, ``partial`` of them before all of their
    completions came; ``skipped`` and ``deferred`` ones were dropped after their pilot, or later.
    ``passed`` positions were not drawn. ``equal`` counts the judged prompts whose rewards were all
    equal, as far as they had a success or a failure. ``completions`` counts trained prompts by
    their number of completions. ``dropped_tokens`` were drawn for the dropped prompts, and
    ``saved_tokens`` are those that they would have cost in addition at ``rollout.group_size``, at
    their mean length.
    """

    written_by: ClassVar[frozenset[Role]] = frozenset({"trainer"})
    at: float
    version: int
    judged: int
    trained: int
    partial: int
    skipped: int
    deferred: int
    passed: int
    equal: int
    completions: dict[str, int] = {}
    dropped_tokens: int = 0
    saved_tokens: int = 0


class MergeKept(msgspec.Struct, frozen=True, kw_only=True):
    """The share of an adapter's change that merged weights contain, in all and by layer, of the
    layers that contain least; and the share of their elements that differ from the base's."""

    kept: float
    changed: float
    layers: dict[str, float] = {}


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the masters' change since version ``since`` that published weights contain
    (`deltawire.train.served_share`), in all and by layer, of the layers that contain least."""

    since: int
    share: float
    layers: dict[str, float] = {}


class Published(_Event, tag="published", frozen=True, kw_only=True):
    """A version was committed; the trainer was paused for ``blocked_ms``. Repeated with the bytes
    of an anchor that came later."""

    written_by: ClassVar[frozenset[Role]] = frozenset({"trainer"})
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
    bytes_reused: int = 0
    """Bytes of the anchor that were stored for the anchor before it."""
    merge: MergeKept | None = None
    served: Served | None = None


class Restored(_Event, tag="restored", frozen=True, kw_only=True):
    """The trainer followed rollback ``decision``: ``version`` has the weights of ``restored``.

    Versions ``first`` to ``last``, which consumed ``groups`` groups, are withdrawn. ``state`` is
    ``exact`` if the optimizer's state was restored too, and ``weights`` if it starts again.
    """

    written_by: ClassVar[frozenset[Role]] = frozenset({"trainer"})
    at: float
    version: int
    decision: int
    restored: int
    first: int
    last: int
    groups: int
    state: Literal["exact", "weights"]
    seconds: float

    @property
    def line(self) -> str:
        """Returns one sentence for people."""
        optimizer = "its optimizer" if self.state == "exact" else "a new optimizer"
        return (
            f"version {self.version} restores version {self.restored} with {optimizer}; versions "
            f"{self.first} to {self.last} are withdrawn, and their {self.groups} groups stay "
            "consumed"
        )


class Swapped(_Event, tag="swapped", frozen=True, kw_only=True):
    """A worker swapped a version into its serving weights, ``running`` sequences in flight."""

    at: float
    version: int
    running: int
    swap_ms: float
    prepare_ms: float


class Generated(_Event, tag="generated", frozen=True, kw_only=True):
    """A worker stored a finished group; ``failed`` of its trajectories are not trained on.

    ``cause`` is the reason of the first failure.
    """

    at: float
    sequence: int
    versions: list[int]
    reward_mean: float
    tokens: int
    failed: int = 0
    cause: str = ""


CorrectShares = list[Annotated[float, Meta(ge=-1, le=1)]]
MOST_RESULTS = 4096
"""Problems of which an evaluation records a share correct, in all sets together: a line is limited
to `MAX_LINE`."""


class HeldoutScore(msgspec.Struct, frozen=True, kw_only=True):
    """Results on a set of ``problems`` held-out problems: the share correct of ``samples`` answers
    each at the rollout's temperature, and of one greedy answer each; and the mean reward of the
    sampled ones. ``correct`` is the share correct of each problem's sampled answers, in the order
    of the set, -1 where all of them failed; it may end before the set does."""

    accuracy: float
    greedy: float
    reward: float
    samples: int
    problems: int
    correct: CorrectShares = []


class Evaluated(_Event, tag="evaluated", frozen=True, kw_only=True):
    """Held-out accuracy of one version over ``problems`` problems: the share correct of
    ``samples`` answers each at the rollout's temperature, and of one greedy answer each; and the
    mean ``reward`` of the sampled ones. ``correct`` and ``sets`` are as in `HeldoutScore`, for each
    named set."""

    written_by: ClassVar[frozenset[Role]] = frozenset({"evaluator"})
    at: float
    version: int
    accuracy: float
    greedy: float = 0.0
    samples: int = 1
    problems: int
    seconds: float
    reward: float | None = None
    correct: CorrectShares = []
    sets: dict[str, HeldoutScore] = {}
    budgets: list[BudgetScore] = []
    """The curve of accuracy over budgets, the smallest first; empty if it is not measured."""
    area: float | None = None
    """The area under that curve, as a share of the largest possible one."""
    off_policy: OffPolicyEstimate | None = None
    """The estimate from live users' answers; None in a run without them."""
    settings: list[SettingScore] = []
    """The scores that the controller compares; empty without one."""
    published: Annotated[float, Meta(ge=0, le=1e15)] = 0.0
    """Mean bytes of a version's delta since the evaluation before, if there is a controller."""


class ServingOpened(_Event, tag="serving_opened", frozen=True, kw_only=True):
    """Stored before a second model opens at the ``version`` that serves: it may end the process."""

    written_by: ClassVar[frozenset[Role]] = frozenset({"evaluator"})
    at: float
    version: int


class ServingMeasured(_Event, tag="serving_measured", frozen=True, kw_only=True):
    """The version that serves, measured again on the sets of the release gate: ``correct`` of all
    held-out problems and of each of the named ``sets``, as in `HeldoutScore`.

    Only ``candidate`` is compared with it; -1 in events of earlier releases. ``failed`` says why
    ``version`` cannot be measured, for any candidate; then there are no results."""

    written_by: ClassVar[frozenset[Role]] = frozenset({"evaluator"})
    at: float
    version: int
    candidate: int = -1
    failed: str = ""
    seconds: float
    correct: CorrectShares = []
    sets: dict[str, CorrectShares] = {}


class SourceLoss(msgspec.Struct, frozen=True, kw_only=True):
    """Mean cross-entropy in nats a token over ``tokens`` of ``documents``, and its exponential;
    None if it was not finite."""

    loss: float | None
    perplexity: float | None
    tokens: int
    documents: int

    @classmethod
    def of(cls, total: float, *, tokens: int, documents: int) -> SourceLoss:
        """Divide a sum over the tokens."""
        loss = total / tokens
        perplexity = math.exp(loss) if loss < _LARGEST_EXPONENT else math.inf
        return cls(
            loss=known(loss), perplexity=known(perplexity), tokens=tokens, documents=documents
        )


class HeldoutLoss(_Event, tag="heldout_loss", frozen=True, kw_only=True):
    """The loss of one version on held-out documents: over the tokens of all ``sources`` together,
    and of each by its name."""

    written_by: ClassVar[frozenset[Role]] = frozenset({"trainer"})
    at: float
    version: int
    total: SourceLoss
    sources: dict[str, SourceLoss]
    seconds: float


class Diverged(_Event, tag="diverged", frozen=True, kw_only=True):
    """Reward and a probe diverged in a family of tasks (``*`` for all together).

    ``reward``, ``value`` (the probe's) and ``excess`` are means over the ``groups`` seen so far;
    ``examples`` name rollouts as worker/sequence#episode.
    """

    written_by: ClassVar[frozenset[Role]] = frozenset({"trainer"})
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


class Attempt(_Event, tag="attempt", frozen=True, kw_only=True):
    """Something that no worker of the run does was done by ``worker``, or in its name, ``count``
    times so far. No group of a ``quarantined`` worker is read or trained on any more."""

    written_by: ClassVar[frozenset[Role]] = frozenset({"trainer"})
    at: float
    worker: str
    kind: str
    count: int
    detail: str = ""
    quarantined: bool = False


class NoProgress(_Event, tag="no_progress", frozen=True, kw_only=True):
    """The last ``steps`` steps up to ``version`` moved nothing, for the ``reason``."""

    written_by: ClassVar[frozenset[Role]] = frozenset({"trainer"})
    at: float
    version: int
    steps: int
    reason: str


class Forecasted(_Event, tag="forecast", frozen=True, kw_only=True):
    """A forecast from measurements up to ``version`` (`deltawire.rl.forecast`).

    ``plateau`` is the ``measure`` after any amount of compute, ``gain`` what twice the compute
    would add: median, lower and upper end of the 90 % interval. ``limit`` is ``budget.stop_when``;
    ``stops`` says that the run is finished because the upper end of ``gain`` is below it.
    """

    written_by: ClassVar[frozenset[Role]] = frozenset({"trainer"})
    at: float
    version: int
    measure: str
    value: float
    plateau: tuple[float, float, float]
    gain: tuple[float, float, float]
    limit: float
    stops: bool


class Controlled(_Event, tag="controlled", frozen=True, kw_only=True):
    """The controller's decision from the evaluation of ``version`` (`deltawire.rl.budget`).

    Groups and steps that start from then on are made with ``after`` instead of ``before``, which
    may be equal. ``accuracy`` is that with ``before``; ``price`` is what one version costs, in
    tokens, by ``sampled``, ``trained``, ``published`` and ``environment``.
    """

    written_by: ClassVar[frozenset[Role]] = frozenset({"evaluator"})
    at: float
    version: int
    before: BudgetSetting
    after: BudgetSetting
    reason: str
    accuracy: float
    price: dict[str, float]
    uses: list[UseGain] = []

    @property
    def moved(self) -> bool:
        """Returns whether the setting changed."""
        return self.before != self.after


class SettingsChanged(_Event, tag="settings", frozen=True, kw_only=True):
    """The run was continued with other settings, from ``version`` on: by dotted key, the old value
    and the new one, as JSON."""

    written_by: ClassVar[frozenset[Role]] = frozenset({"trainer"})
    at: float
    version: int
    changes: dict[str, tuple[Any, Any]]


class WarmStep(_Event, tag="warm_step", frozen=True, kw_only=True):
    """Progress of the supervised warm start; ``accuracy`` is on separate validation problems.

    ``loss`` is None if it was not a finite number.
    """

    written_by: ClassVar[frozenset[Role]] = frozenset({"warm-start"})
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
    """The divergence of sampler and trainer on the batch that made ``version``, or would have.

    ``numeric`` is over tokens that the trained version itself drew, ``drift`` over all. If no such
    token was in the batch, ``numeric`` may be over tokens that ``numeric_version`` drew, whose
    weights the trainer had kept for it.
    ``flipped`` is the share of flipped expert choices in each expert layer. ``warnings`` and
    ``stopped`` name the thresholds that were crossed, ``masked`` the sequences removed from the
    loss: worker, group and index in it.
    """

    written_by: ClassVar[frozenset[Role]] = frozenset({"trainer"})
    at: float
    version: int
    numeric: Gaps
    numeric_version: int | None = None
    drift: Gaps
    flipped: list[float] = []
    warnings: list[str] = []
    masked: list[str] = []
    stopped: list[str] = []
    left_out: dict[str, int] = {}
    """By field, the number of entries that were left out of a line that would be too long."""

    @property
    def sequences_masked(self) -> int:
        """The number of sequences removed from the loss, those left out of ``masked`` included."""
        return len(self.masked) + self.left_out.get("masked", 0)


Event = (
    Life
    | Allocated
    | Span
    | Step
    | Published
    | Restored
    | Swapped
    | Generated
    | Evaluated
    | ServingOpened
    | ServingMeasured
    | HeldoutLoss
    | WarmStep
    | Parity
    | Diverged
    | Attempt
    | NoProgress
    | SettingsChanged
    | Forecasted
    | Controlled
)

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Event)


def known(value: float) -> float | None:
    """Return the number, or None if JSON cannot hold it: such a line could not be read."""
    return value if math.isfinite(value) else None


def encode_lines(events: Iterable[Event]) -> bytes:
    """Encode events as newline-terminated JSON lines of at most `MAX_LINE` bytes.

    A longer one is shortened, since readers would skip it: equal pairs of a step's ``staleness``
    and ``queued`` are counted, which loses only their order; then the largest field is halved until
    the line fits. ``left_out`` counts what is missing; a text that was cut ends in an ellipsis.
    """
    return b"".join(_encode_line(event) + b"\n" for event in events)


def _encode_line(event: Event) -> bytes:
    line = _encoder.encode(event)
    if len(line) > MAX_LINE and isinstance(event, Step):
        event = _counted(event)
        line = _encoder.encode(event)
    while len(line) > MAX_LINE:
        event = _halved(event)
        line = _encoder.encode(event)
    return line


def _counted(step: Step) -> Step:
    if not step.staleness or len(step.queued) != len(step.staleness):
        return step
    counts = Counter(zip(step.staleness, step.queued, strict=True))
    ages = [(age, queued, number) for (age, queued), number in sorted(counts.items())]
    return msgspec.structs.replace(step, staleness=[], queued=[], ages=ages)


def _expanded(step: Step) -> Step:
    """Restore the lists of a step whose line holds counts."""
    groups = sum(number for _, _, number in step.ages)
    if min(number for _, _, number in step.ages) < 0 or groups > MAX_STEP_GROUPS:
        raise msgspec.ValidationError("the counts of a step's groups are out of range")
    pairs = [(age, queued) for age, queued, number in step.ages for _ in range(number)]
    staleness, queued = [age for age, _ in pairs], [queued for _, queued in pairs]
    return msgspec.structs.replace(step, staleness=staleness, queued=queued, ages=[])


def _halved(event: Event) -> Event:
    """Leave out half of the event's largest field."""
    sizes = {
        name: len(_encoder.encode(value))
        for name in event.__struct_fields__
        if isinstance(value := getattr(event, name), list | dict | str) and name != "left_out"
    }
    name = max(sizes, key=lambda name: sizes[name])
    value = getattr(event, name)
    keep = len(value) // 2
    if isinstance(value, str):
        return msgspec.structs.replace(event, **{name: value[:keep] + "…"})
    changes: dict[str, Any] = {
        name: value[:keep] if isinstance(value, list) else dict(list(value.items())[:keep])
    }
    if isinstance(event, Step | Parity):
        missing = event.left_out.get(name, 0) + len(value) - keep
        changes["left_out"] = {**event.left_out, name: missing}
    return msgspec.structs.replace(event, **changes)


def decode_lines(data: bytes) -> list[Event]:
    """Decode the events in ``data``; lines that are none, such as a newer writer's, are skipped."""
    events: list[Event] = []
    for line in data.splitlines():
        if len(line) > MAX_LINE:
            continue
        try:
            event = _decoder.decode(line)
            events.append(_expanded(event) if isinstance(event, Step) and event.ages else event)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            continue
    return events

"""Reports a simulation of live users: figures, and a picture of satisfaction, arms and feedback.

Everything about satisfaction comes from the simulator's own notes; versions, decisions and the ages
of what was trained on come from the run's bucket.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from deltawire.rl.control.lineages import read_lineages
from deltawire.store import Bucket
from deltawire.testing.users.driver import DriveResult, ServedNote
from deltawire.testing.users.population import STYLES, Population
from deltawire.wire import keys
from deltawire.wire.captures import GatewayState
from deltawire.wire.decisions import (
    CANDIDATE,
    MAX_DECISION_BYTES,
    UNDECIDED,
    Decision,
    ServedVersion,
)
from deltawire.wire.objects import decode_json
from deltawire.wire.receipts import SERVING

AGES_S = (5.0, 10.0, 20.0, 40.0, 80.0)
"""The bounds between which ages of trained answers are counted, in seconds."""
PARTS = 5
"""The first and the last of so many parts of the time are compared."""
BIN_S = 10.0
CERTAIN = 3.0
"""A loss of satisfaction beyond so many standard errors is no chance."""
Outcome = Literal["promoted", "stopped by the gate", "rolled back", "undecided"]
VERDICTS = ("serve", "gate", "shadow", "canary", "hold", "promote", "rollback")
_MAX_STATE_BYTES = 1 << 20


class DecisionNote(msgspec.Struct, frozen=True):
    """A decision: seconds from the start, the verdict, why, and the version that it is about: the
    candidate, or the one that serves from then on."""

    at: float
    verdict: str
    share: float
    reason: str
    version: int = 0


class CandidateNote(msgspec.Struct, frozen=True):
    """A candidate: ``planted`` says how it, or a version that it was trained from, was spoiled
    (empty: it was not), and ``outcome`` what became of it. ``answers`` users saw it, whose mean
    true satisfaction is ``satisfaction``; ``serving`` is that of the other users meanwhile."""

    version: int
    planted: str
    outcome: Outcome
    seconds: float
    answers: int
    satisfaction: float | None
    serving: float | None


class SimulationReport(msgspec.Struct, kw_only=True):
    """The figures of one simulation. Satisfaction is true satisfaction, from 0 to 1.

    ``gain`` is that of the last fifth of the time less that of the first, and ``gain_se`` its
    standard error. ``planted`` are the versions of ``live.planted``. ``trained_by_age`` counts
    answers by the seconds from serving to grouping.
    """

    name: str
    seed: int
    seconds: float
    answers: int
    failed: int
    reports: int
    first: float
    last: float
    gain: float
    gain_se: float
    indifferent: float
    optimum: float
    versions: int
    trained: int
    captures_lost: float
    feedback_lost: float
    arms: dict[str, int] = {}
    trained_by_age: dict[str, int] = {}
    counts: dict[str, int] = {}
    decisions: list[DecisionNote] = []
    candidates: list[CandidateNote] = []
    planted: dict[str, int] = {}

    @property
    def failures(self) -> list[str]:
        """Says which planted versions were promoted, and whether users ended less satisfied, by
        more than `CERTAIN` standard errors."""
        found = [
            f"candidate {one.version}, planted for {one.planted}, was promoted"
            for one in self.candidates
            if one.planted and one.outcome == "promoted"
        ]
        if self.gain < -CERTAIN * self.gain_se:
            found.append(f"users are less satisfied: {self.first:.3f} → {self.last:.3f}")
        return found


@dataclass(frozen=True)
class Simulated:
    """The traces of a simulation: the notes of its users and the bucket of its run.

    ``began`` is the time of the first request, in seconds since 1970; ``planted`` are the versions
    of ``live.planted``.
    """

    name: str
    population: Population
    result: DriveResult
    bucket: Bucket
    began: float
    seconds: float
    planted: Mapping[str, int] = field(default_factory=dict)


def report_of(done: Simulated) -> SimulationReport:
    """Reads the bucket and returns the figures."""
    notes, part = done.result.notes, done.seconds / PARTS
    first = [n.satisfaction for n in notes if n.at < part]
    last = [n.satisfaction for n in notes if done.seconds - part <= n.at]
    lineages = read_lineages(done.bucket)
    ages = [one.age_s for lineage in lineages for one in lineage.answers]
    states = _gateway_states(done.bucket)
    made = _decisions(done.bucket)
    return SimulationReport(
        name=done.name,
        seed=done.population.settings.seed,
        seconds=done.seconds,
        answers=len(notes),
        failed=done.result.counts["failed"],
        reports=done.result.counts["reports"],
        first=_mean(first),
        last=_mean(last),
        gain=_mean(last) - _mean(first),
        gain_se=math.hypot(_error(first), _error(last)),
        indifferent=done.population.indifferent(),
        optimum=done.population.optimum(done.seconds),
        versions=max((note.version for note in notes), default=0),
        trained=len(ages),
        captures_lost=sum(state.counts.get("captures_lost", 0.0) for state in states),
        feedback_lost=sum(state.counts.get("feedback_lost", 0.0) for state in states),
        arms=dict(Counter(note.arm for note in notes)),
        trained_by_age=_by_age(ages),
        counts=dict(done.result.counts),
        decisions=[_note(one, done.began) for one in made],
        candidates=_candidates(made, done),
        planted=dict(done.planted),
    )


def write_simulation(report: SimulationReport, notes: Sequence[ServedNote], out: Path) -> Path:
    """Writes ``live.json``, ``live.svg`` and the notes into ``out``; returns the picture's path."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "live.json").write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2))
    lines = b"".join(msgspec.json.encode(note) + b"\n" for note in notes)
    (out / "notes.jsonl").write_bytes(lines)
    path = out / "live.svg"
    _draw(report, notes, path)
    return path


def lines_of(report: SimulationReport) -> list[tuple[str, str]]:
    """Returns the figures as rows of a table: name and value."""
    ages = ", ".join(f"{name} {count}" for name, count in report.trained_by_age.items())
    arms = ", ".join(f"{name} {count}" for name, count in sorted(report.arms.items()))
    rows = [
        (
            "answers",
            (
                f"{report.answers} of {report.counts.get('asked', 0)} requests in "
                f"{report.seconds:.0f} s, {report.failed} failed, "
                f"{report.counts.get('turned_away', 0)} turned away, "
                f"{report.counts.get('waited', 0)} waited for a place"
            ),
        ),
        ("true satisfaction", f"{report.first:.3f} → {report.last:.3f}"),
        ("gain", f"{report.gain:+.3f} ± {report.gain_se:.3f} (standard error)"),
        ("all styles alike / best policy", f"{report.indifferent:.3f} / {report.optimum:.3f}"),
        ("versions served", str(report.versions)),
        ("answers trained on, by age", f"{report.trained}: {ages}"),
        ("answers by arm", arms),
        ("captures / feedback lost", f"{report.captures_lost:.0f} / {report.feedback_lost:.0f}"),
    ]
    rows += [(f"candidate {one.version}", _story(one)) for one in report.candidates]
    rows += [
        (
            f"planted: {kind}",
            f"version {version} was in no candidate; a longer run or a faster machine may show it",
        )
        for kind, version in report.planted.items()
        if not any(kind in one.planted.split(", ") for one in report.candidates)
    ]
    rows += [
        (f"decision at {d.at:.0f} s", f"{d.verdict} of version {d.version}: {d.reason}")
        for d in report.decisions
    ]
    return rows


def _story(one: CandidateNote) -> str:
    words = f"{one.outcome} after {one.seconds:.0f} s"
    if one.planted:
        words += f", planted: {one.planted}"
    if one.satisfaction is not None and one.serving is not None:
        words += f"; satisfaction {one.satisfaction:.3f}, of others {one.serving:.3f}"
    return words


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _error(values: Sequence[float]) -> float:
    if len(values) < 2:
        return math.nan
    mean = _mean(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))


def _by_age(ages: Sequence[float]) -> dict[str, int]:
    names = [f"≤ {bound:g} s" for bound in AGES_S] + [f"> {AGES_S[-1]:g} s"]
    counts = Counter(sum(age > bound for bound in AGES_S) for age in ages)
    return {name: counts[place] for place, name in enumerate(names) if counts[place]}


def _gateway_states(bucket: Bucket) -> list[GatewayState]:
    found = []
    for key in bucket.list(keys.LIVE_GATEWAYS):
        data = bucket.get(key, limit=_MAX_STATE_BYTES)
        if data is not None:
            found.append(decode_json(data, GatewayState, run=bucket.url, key=key))
    return found


def _decisions(bucket: Bucket) -> list[Decision]:
    found = []
    for key in bucket.list(keys.LIVE_DECISIONS):
        data = bucket.get(key, limit=MAX_DECISION_BYTES)
        if data is not None:
            found.append(decode_json(data, Decision, run=bucket.url, key=key))
    return found


def _note(made: Decision, began: float) -> DecisionNote:
    about = made.candidate or made.serving
    return DecisionNote(made.at - began, made.verdict, made.share, made.reason, about.version)


def _candidates(decisions: Sequence[Decision], done: Simulated) -> list[CandidateNote]:
    found = []
    end = Decision(
        number=0, run="0" * 32, verdict="hold", serving=ServedVersion(0, "0" * 32), by="",
        at=done.began + done.seconds,
    )  # fmt: skip
    for place, begun in enumerate(decisions):
        if begun.verdict != "gate" or begun.candidate is None:
            continue
        later = decisions[place + 1 :]
        settles = (n for n, one in enumerate(later) if one.verdict not in UNDECIDED - {"gate"})
        ended = next(settles, len(later))
        last = later[ended] if ended < len(later) else end
        outcome: Outcome = "undecided"
        if last.verdict == "promote":
            outcome = "promoted"
        elif last.verdict == "rollback":
            shown = any(one.share for one in later[:ended])
            outcome = "rolled back" if shown else "stopped by the gate"
        spoiled = [
            kind
            for kind, version in done.planted.items()
            if begun.serving.version < version <= begun.candidate.version
        ]
        arms: dict[str, list[float]] = {CANDIDATE: [], SERVING: []}
        for note in done.result.notes:
            if begun.at <= note.at + done.began <= last.at and note.arm in arms:
                arms[note.arm].append(note.satisfaction)
        found.append(
            CandidateNote(
                version=begun.candidate.version,
                planted=", ".join(spoiled),
                outcome=outcome,
                seconds=last.at - begun.at,
                answers=len(arms[CANDIDATE]),
                satisfaction=_mean(arms[CANDIDATE]) if arms[CANDIDATE] else None,
                serving=_mean(arms[SERVING]) if arms[SERVING] else None,
            )
        )
    return found


def _draw(report: SimulationReport, notes: Sequence[ServedNote], path: Path) -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    verdicts = [name for name in VERDICTS if any(d.verdict == name for d in report.decisions)]
    ratios = [3.0, 0.3 + 0.2 * len(verdicts), 2.0, 1.4]
    with rc_context({"font.size": 8, "svg.fonttype": "none", "svg.hashsalt": "deltawire"}):
        figure = Figure(figsize=(9.6, 1.15 * sum(ratios)), layout="constrained")
        rows: Any = figure.subplots(4, 1, height_ratios=ratios)
        bins = _bins(report, notes)
        _draw_satisfaction(rows[0], report, bins)
        _draw_decisions(rows[1], report, verdicts)
        _draw_styles(rows[2], report, bins)
        names = list(report.trained_by_age)
        rows[3].bar(names, [report.trained_by_age[name] for name in names], color="#3056d3")
        rows[3].set_title("answers trained on, by age", loc="left")
        figure.savefig(path)


def _draw_decisions(axes: Any, report: SimulationReport, verdicts: Sequence[str]) -> None:
    """Draw one line for each verdict, with the versions; a label that would cover another is
    left out."""
    last = dict.fromkeys(verdicts, -math.inf)
    for made in report.decisions:
        if made.verdict not in last:
            continue
        place = len(verdicts) - 1 - verdicts.index(made.verdict)
        color = "#c62f3b" if made.verdict == "rollback" else "#3056d3"
        axes.plot([made.at], [place], marker="|", markersize=9, color=color)
        if made.at - last[made.verdict] > report.seconds / 25:
            last[made.verdict] = made.at
            words = f" v{made.version}"
            edge = made.at > report.seconds * 0.96
            axes.annotate(
                words, (made.at, place), color=color, va="center", ha="right" if edge else "left"
            )
    axes.set(xlim=(0, report.seconds), ylim=(-0.7, max(len(verdicts), 1) - 0.3))
    axes.set_yticks(range(len(verdicts)), verdicts[::-1])
    axes.set_title("decisions, and the versions that they are about", loc="left")


def _bins(report: SimulationReport, notes: Sequence[ServedNote]) -> list[list[ServedNote]]:
    found: list[list[ServedNote]] = [[] for _ in range(int(report.seconds // BIN_S) + 1)]
    for note in notes:
        found[min(int(note.at // BIN_S), len(found) - 1)].append(note)
    return found


def _draw_satisfaction(
    axes: Any, report: SimulationReport, bins: Sequence[Sequence[ServedNote]]
) -> None:
    for arm, color in zip(sorted(report.arms), ("#c2630d", "#3056d3", "#0e7a4b"), strict=False):
        points = [  # No answers, no mean: a line ends where its canary does.
            (BIN_S * (place + 0.5), _mean([n.satisfaction for n in notes if n.arm == arm]))
            for place, notes in enumerate(bins)
        ]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, color=color, label=arm)
    newest = 0
    for place, notes in enumerate(bins):
        version = max((note.version for note in notes), default=0)
        if version > newest:
            newest = version
            if BIN_S * place < 0.98 * report.seconds:  # There is no room at the edge.
                axes.annotate(f"v{version}", (BIN_S * place, 0.02), color="#5d6676", rotation=90)
    axes.axhline(report.optimum, color="#0e7a4b", lw=1, ls="--", label="best policy")
    axes.axhline(report.indifferent, color="#5d6676", lw=1, ls=":", label="all styles alike")
    for made in report.decisions:
        if made.verdict in ("promote", "rollback"):
            color = "#c62f3b" if made.verdict == "rollback" else "#0e7a4b"
            axes.axvline(made.at, color=color, lw=0.8, alpha=0.6)
    axes.set(ylim=(0, 1), xlim=(0, report.seconds), xlabel="seconds")
    axes.set_title("true satisfaction by arm, versions and decisions", loc="left")
    _legend_above(axes)


def _draw_styles(axes: Any, report: SimulationReport, bins: Sequence[Sequence[ServedNote]]) -> None:
    at = [BIN_S * (place + 0.5) for place in range(len(bins))]
    shares = [
        [sum(n.style == style for n in notes) / max(len(notes), 1) for notes in bins]
        for style in (*STYLES, "")
    ]
    axes.stackplot(at, *shares, labels=[*STYLES, "none"])
    axes.set(ylim=(0, 1), xlim=(0, report.seconds), xlabel="seconds")
    axes.set_title("styles of answers", loc="left")
    _legend_above(axes)


def _legend_above(axes: Any) -> None:
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=6, frameon=False, borderaxespad=0.2)

"""Present problems of a run, the worst first: the top of the page."""

from __future__ import annotations

from typing import Literal

import msgspec

from deltawire.dashboard.status import ProcessLine, RunStatus
from deltawire.dashboard.wording import duration

Severity = Literal["alarm", "warning"]
MAX_NAMED = 12
UNDECIDED_AFTER_S = 600.0
LOOKS_WITHIN_S = 3600.0


class RunProblem(msgspec.Struct, frozen=True, kw_only=True):
    """A problem in one sentence. An ``alarm`` stops or spoils the run, a ``warning`` may not."""

    severity: Severity
    text: str
    process: str = ""


def problems_of(status: RunStatus) -> list[RunProblem]:
    """Every problem that a status states, alarms first."""
    found = [RunProblem(severity="alarm", text=status.alarm)] if status.alarm else []
    if status.release is not None and status.release.waits_for == "person":
        words = f"the release is held for a person: {status.release.words}"
        found.append(RunProblem(severity="warning", text=words))
    if status.release is not None and status.release.gap_alarm:
        words = "users do not see the gain of the last candidate on held-out tasks"
        found.append(RunProblem(severity="alarm", text=f"{words}; see deltawire live status"))
    if status.release is not None and status.release.paused_until:
        words = f"the evaluation gate stopped {status.release.gate_failures} candidates in a row"
        found.append(RunProblem(severity="alarm", text=f"{words}: learning pauses"))
    if status.release is not None and status.release.decayed is not None:
        words = f"versions up to {status.release.decayed} added up to a loss"
        found.append(
            RunProblem(severity="alarm", text=f"{words}: users returned to the hold-back version")
        )
    if status.release is not None and status.release.void:
        words = f"void decisions: {status.release.void}; see deltawire live status"
        found.append(RunProblem(severity="warning", text=words))
    found += _of_release(status)
    found += _silent(status.processes)
    found += _silent_live(status)
    found += [
        RunProblem(
            severity="alarm" if one.quarantined else "warning",
            text=f"{one.worker}: {one.kind}, {one.count} times"
            + (", quarantined" if one.quarantined else "")
            + (f": {one.detail}" if one.detail else ""),
            process=one.worker,
        )
        for one in status.incidents[:MAX_NAMED]
    ]
    stale = status.staleness
    if stale.bound is not None and (stale.total.max or 0) > stale.bound:
        words = f"groups up to {stale.total.max} versions old were trained on; the bound is"
        found.append(RunProblem(severity="alarm", text=f"{words} {stale.bound}"))
    found += [
        RunProblem(severity="alarm", text=one.alarm, process=one.process)
        for one in status.readers
        if one.alarm and one.state != "ended"
    ][:MAX_NAMED]
    found += [RunProblem(severity="warning", text=text) for text in status.problems]
    found.sort(key=lambda one: one.severity != "alarm")
    return found


def _of_release(status: RunStatus) -> list[RunProblem]:
    """A canary that waits, and rollbacks of the last day."""
    release, found = status.release, list[RunProblem]()
    if release is None:
        return found
    if release.verdict == "hold" and release.waits_for == "data":
        words = f"the release is on hold, and waits for data: {release.words}"
        found.append(RunProblem(severity="warning", text=words))
    if release.rollbacks:
        words = f"{release.rollbacks} rollbacks within a day, the last: {release.rollback_reason}"
        found.append(RunProblem(severity="warning", text=words))
    return found


def _silent_live(status: RunStatus) -> list[RunProblem]:
    """Gateways, replicas and the decider that do not do their work."""
    found = []
    for one in status.live_processes[: 4 * MAX_NAMED]:
        if one.state == "silent":
            severity: Severity = "alarm" if one.role == "decider" else "warning"
            words = f"{one.role} {one.name} is silent: no sign of life for {duration(one.age_s)}"
            found.append(RunProblem(severity=severity, text=words, process=one.name))
        elif one.state == "stalled":
            words = f"{one.role} {one.name} takes no requests: {one.doing}"
            found.append(RunProblem(severity="warning", text=words, process=one.name))
    decides = [one for one in status.live_processes if one.role == "decider"]
    release = status.release
    waits = release is not None and release.verdict in ("gate", "shadow", "canary")
    late = release is not None and status.at - release.at > UNDECIDED_AFTER_S
    # One that ended a while ago may have been run with --once, by a timer.
    if waits and late and all(o.state == "ended" and o.age_s > LOOKS_WITHIN_S for o in decides):
        words = (
            "a candidate is undecided, and nothing looked at it in the last hour: start deltawire "
            "live decide, or run it with --once more often"
        )
        found.append(RunProblem(severity="warning", text=words))
    return found[:MAX_NAMED]


def _silent(processes: list[ProcessLine]) -> list[RunProblem]:
    """Processes without a sign of life or progress; a trainer's and the first few by name."""
    bad = [one for one in processes if one.state in ("silent", "stalled")]
    bad.sort(key=lambda one: (one.role != "trainer", one.name))
    found = [
        RunProblem(
            severity="alarm" if one.role == "trainer" else "warning",
            text=f"{one.name} is {one.state}"
            + (
                f": no sign of life for {duration(one.age_s)}"
                if one.age_s is not None and one.state == "silent"
                else ""
            ),
            process=one.name,
        )
        for one in bad[:MAX_NAMED]
    ]
    if len(bad) > MAX_NAMED:
        more = len(bad) - MAX_NAMED
        found.append(
            RunProblem(severity="warning", text=f"and {more} more processes are not alive")
        )
    return found

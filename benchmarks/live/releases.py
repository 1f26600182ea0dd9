"""``releases_right``: runs of ``make live`` in which no bad version reached all users.

Each of `SEEDS` seeds is one ``deltawire simulate examples/live.toml --requests 10000``: trainer,
learner, evaluator, replicas, gateway and decider are real processes. A seed is right if the gate or
the users' outcomes stopped each planted version, none was promoted, and true satisfaction rose by
`WORTH`. A seed whose command failed in any way, or that did not get as far as a planted version, is
not right.

A seed that was measured is kept in ``--out`` and not measured again. ``--repeats`` is how many
seeds are measured at most now; the key is null while one is missing. Details state the load of the
machine, since other programs make a run slower.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.live.seeds import Ended, read_ended, read_report, run_seed
from benchmarks.runner import ROOT
from benchmarks.training.keys import Measured, Options
from deltawire.config import load_config
from deltawire.dashboard.simulation import SimulationReport

EXAMPLE = ROOT / "examples" / "live.toml"
SEEDS = 20
REQUESTS = 10_000
LIMIT_S = 7200.0
"""Seconds that one seed may take, on a machine that is busy with other work too."""
WORTH = 0.1
STOPPED = ("stopped by the gate", "rolled back")


def row_of(report: SimulationReport | None, ended: Ended, planted: list[str]) -> dict[str, Any]:
    """Returns what became of a seed, and under ``right`` whether it is as it should be."""
    row: dict[str, Any] = {
        "right": False,
        "code": ended.code,
        "minutes": round(ended.minutes, 1),
        "load": round(ended.load, 1),
    }
    if report is None:
        return row | {"said": ended.said}
    became = {kind: _became(report, kind) for kind in planted}
    asked, away = report.counts.get("asked", 0), report.counts.get("turned_away", 0)
    row |= {
        "planted": became,
        "gain": round(report.gain, 4),
        "gain_se": round(report.gain_se, 4),
        "asked": asked,
        "turned_away": away,
        "waited": report.counts.get("waited", 0),
        "seconds": round(report.seconds),
        "failed": report.failed,
        "lost": report.captures_lost + report.feedback_lost,
        "versions": report.versions,
        "promoted": sum(one.outcome == "promoted" for one in report.candidates),
    }
    stopped = all(outcome in STOPPED for outcome in became.values())
    row["right"] = ended.code == 0 and stopped and report.gain >= WORTH
    return row


def _became(report: SimulationReport, kind: str) -> str:
    """Return the worst outcome of the candidates that hold a planted version."""
    outcomes = {one.outcome for one in report.candidates if kind in one.planted.split(", ")}
    for outcome in ("promoted", "rolled back", "stopped by the gate", "undecided"):
        if outcome in outcomes:
            return outcome
    return "no candidate"


def measure(options: Options) -> Measured:
    """Measures the key, as far as ``--repeats`` seeds go."""
    out = Path(options.out or "runs/bench-live")
    planted = [str(kind) for kind in load_config(EXAMPLE).live.planted]
    seeds = range(options.seed, options.seed + SEEDS)
    folders = {seed: out / f"release-{REQUESTS}-{seed}" for seed in seeds}
    missing = [seed for seed, folder in folders.items() if read_ended(folder) is None]
    for seed in missing[: options.repeats]:
        run_seed(
            folders[seed], seed, config=EXAMPLE, span=("--requests", str(REQUESTS)),
            limit_s=LIMIT_S,
        )  # fmt: skip
    rows: dict[str, Any] = {}
    for seed, folder in folders.items():
        ended = read_ended(folder)
        rows[str(seed)] = None if ended is None else row_of(read_report(folder), ended, planted)
    details: dict[str, Any] = {"seeds": rows}
    if left := [seed for seed, row in rows.items() if row is None]:
        details["missing"] = f"seeds {left} are not measured: call it again with the same --out"
        return Measured({"releases_right": None}, details)
    return Measured({"releases_right": sum(row["right"] for row in rows.values())}, details)

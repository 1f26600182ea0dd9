"""``deltawire bench peers``: the same small GRPO job in TRL and in deltawire, on the same cores.

Both begin from the same warm-started model, and take the same number of steps over as many tasks,
with the same groups, lengths, clip bounds, optimizer and schedule; one after the other, in the
order of the seeds. Accuracy is measured afterwards from checkpoints, by transformers' own sampling.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.peers.grpo.job import OURS, THEIRS, JobFigures, Start, run_ours, run_theirs
from deltawire.errors import InputError


class _Kept(msgspec.Struct, frozen=True):
    """The figures of a job, and the options that they hold for."""

    options: dict[str, float | int]
    figures: JobFigures


def run(arguments: argparse.Namespace) -> int:
    """Runs the jobs; prints a table, or all figures as JSON."""
    if importlib.util.find_spec("trl") is None:
        raise InputError("bench peers needs the package trl", hint="pip install 'deltawire[trl]'")
    if arguments.steps % arguments.save:
        raise InputError(f"--steps {arguments.steps} is not a multiple of --save {arguments.save}")
    console = Console(stderr=arguments.json, highlight=False)
    out = Path(arguments.out)
    found: list[JobFigures] = []
    options = {"steps": arguments.steps, "save": arguments.save, "target": arguments.target}
    for seed in range(arguments.seeds):
        for system in (OURS, THEIRS)[:: -1 if seed % 2 else 1]:
            found.append(measured(out, seed, system, options))
            last = found[-1]
            console.print(f"seed {seed}, {last.system}: {last.seconds:.0f} s of training")
    if arguments.json:
        told = {"target": arguments.target, "jobs": msgspec.to_builtins(found)}
        Console().print_json(data=told)
    else:
        console.print(table(found, arguments.target))
    return 0


def measured(out: Path, seed: int, system: str, options: Mapping[str, float | int]) -> JobFigures:
    """Returns the figures of one job: those in ``out`` if it was measured there with the same
    options, so that a command that was interrupted continues with the next job."""
    place = out / f"seed-{seed}" / f"{system}.json"
    if place.exists():
        known = msgspec.json.decode(place.read_bytes(), type=_Kept)
        if known.options == options:
            return known.figures
    start = Start(out, seed=seed)
    shutil.rmtree(start.folder / system, ignore_errors=True)
    figures = (run_ours if system == OURS else run_theirs)(start, **options)  # type: ignore[arg-type]
    place.write_bytes(msgspec.json.encode(_Kept(dict(options), figures)))
    return figures


def table(found: Sequence[JobFigures], target: float) -> Table:
    """Medians over the seeds, side by side; a row that deltawire loses is marked."""
    shown = Table("", OURS, THEIRS, "better")
    for name, text, more in (
        ("tokens a second", "tokens_per_second", True),
        ("seconds a step", "seconds", False),
        (f"seconds to {target:.0%} pass@1", "seconds_to_target", False),
        ("pass@1 at the end", "last", True),
        ("peak memory, MB", "peak_bytes", False),
        ("lines that a user writes", "lines", False),
    ):
        ours, theirs = (_median(found, system, text) for system in (OURS, THEIRS))
        shown.add_row(name, _number(ours), _number(theirs), _better(ours, theirs, more=more))
    return shown


def _median(found: Sequence[JobFigures], system: str, figure: str) -> float | None:
    values = [_value(one, figure) for one in found if one.system == system]
    known = [value for value in values if value is not None]
    return median(known) if known and len(known) == len(values) else None


def _value(one: JobFigures, figure: str) -> float | None:
    match figure:
        case "seconds":
            return one.seconds / one.steps
        case "peak_bytes":
            return one.peak_bytes / 1e6
        case "last":
            return one.accuracies[max(one.accuracies)]
        case _:
            value: float | None = getattr(one, figure)
            return value


def _number(value: float | None) -> str:
    return "not reached" if value is None else f"{value:,.4g}"


def _better(ours: float | None, theirs: float | None, *, more: bool) -> str:
    if ours == theirs:
        return "equal"
    if ours is None or theirs is None:
        return THEIRS if ours is None else OURS
    return OURS if (ours > theirs) == more else f"{THEIRS} (we lose)"

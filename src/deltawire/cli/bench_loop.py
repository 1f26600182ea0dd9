"""``deltawire bench loop``: the same job alternating and pipelined, on the same two cores.

Alternating is the staleness bound 0: a step's groups are sampled at its own version, then the
workers wait for the next one (`deltawire.rl.admission` derives it). Pipelined is the configured
bound. The trainer is pinned to one core and the workers to the other, so that neither way gets
more of the machine; the two ways take turns over the seeds, so that a slow hour hits both.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from statistics import fmean, median, stdev

import msgspec
from rich.console import Console
from rich.table import Table

from deltawire.cli.run import Job, Pins, execute
from deltawire.config import RunConfig, load_config
from deltawire.dashboard.summary import Summary
from deltawire.errors import InputError
from deltawire.store import open_bucket

WAYS = ("alternating", "pipelined")


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of both ways."""

    alternating: float
    pipelined: float


class LoopFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over the seeds; ``pipelined_speedup`` is that of the ratios within one seed.

    Idle shares, and accuracies in 0 … 1; ``heldout_spread`` is the standard deviation over seeds.
    """

    pipelined_speedup: float
    speedups: list[float]
    steps_per_minute: Pair
    trainer_idle: Pair
    worker_idle: Pair
    heldout: Pair
    heldout_spread: Pair
    staleness_max: Pair
    seeds: int
    pinned: bool


def bench_loop(arguments: argparse.Namespace) -> int:
    """Run every seed both ways and print the figures."""
    path = Path(arguments.config)
    config = load_config(path)
    console = Console(stderr=True)
    if arguments.seeds < 1:
        raise InputError("--seeds must be at least 1")
    results: dict[str, list[Summary]] = {way: [] for way in WAYS}
    for seed in range(arguments.seeds):
        for way in WAYS if seed % 2 == 0 else reversed(WAYS):
            console.print(f"seed {seed}, {way}", style="bold")
            out = Path(arguments.out) / f"{way}-{seed}"
            results[way].append(_one(config, way, seed, out, console))
    figures = _figures(results, arguments.seeds)
    if arguments.json:
        Console().print_json(msgspec.json.encode(figures).decode())
    else:
        Console().print(_table(figures))
    return 0


def _one(config: RunConfig, way: str, seed: int, out: Path, console: Console) -> Summary:
    """One run in a fresh place; the seed's warm start is made once and used both ways."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    bound = 0 if way == "alternating" else config.train.max_staleness
    train = msgspec.structs.replace(config.train, max_staleness=bound)
    resolved = msgspec.structs.replace(config, seed=seed, train=train)
    written = out / "config.json"
    written.write_bytes(msgspec.json.encode(resolved))
    pins = Pins(*_cores())
    bucket = open_bucket(str(out / "bucket"), create=True)
    job = Job(resolved, written, None, out, bucket, pins, warm_out=out.parent / f"warm-{seed}")
    summary = execute(job, console, plain=not console.is_terminal)
    if summary is None:
        raise KeyboardInterrupt
    return summary


def _cores() -> tuple[str, str]:
    """One processor for the trainer, another for the workers, where the system can pin."""
    if not hasattr(os, "sched_getaffinity"):
        return "", ""
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        raise InputError("bench loop needs two processors", hint="give it two")
    return str(allowed[0]), str(allowed[1])


def _figures(results: dict[str, list[Summary]], seeds: int) -> LoopFigures:
    alternating, pipelined = results["alternating"], results["pipelined"]
    ratios = [
        (fast.steps_per_minute or 0.0) / (slow.steps_per_minute or 1.0)
        for slow, fast in zip(alternating, pipelined, strict=True)
    ]

    def accuracies(runs: list[Summary]) -> list[float]:
        return [run.heldout.last or 0.0 for run in runs]

    def pair(figure: dict[str, float]) -> Pair:
        return Pair(alternating=figure["alternating"], pipelined=figure["pipelined"])

    return LoopFigures(
        pipelined_speedup=median(ratios),
        speedups=ratios,
        steps_per_minute=pair(
            {way: median(run.steps_per_minute or 0.0 for run in results[way]) for way in WAYS}
        ),
        trainer_idle=pair(
            {way: median(run.idle.trainer or 0.0 for run in results[way]) for way in WAYS}
        ),
        worker_idle=pair(
            {way: median(run.idle.workers or 0.0 for run in results[way]) for way in WAYS}
        ),
        heldout=pair({way: fmean(accuracies(results[way])) for way in WAYS}),
        heldout_spread=pair(
            {way: stdev(accuracies(results[way])) if seeds > 1 else 0.0 for way in WAYS}
        ),
        staleness_max=pair(
            {way: float(max(run.staleness.max or 0 for run in results[way])) for way in WAYS}
        ),
        seeds=seeds,
        pinned=hasattr(os, "sched_setaffinity"),
    )


def _table(figures: LoopFigures) -> Table:
    table = Table(
        "", "alternating", "pipelined", title=f"bench loop, {figures.seeds} seeds", box=None
    )

    def row(label: str, pair: Pair, form: str) -> None:
        table.add_row(label, form.format(pair.alternating), form.format(pair.pipelined))

    row("steps a minute (median)", figures.steps_per_minute, "{:.1f}")
    row("trainer idle", figures.trainer_idle, "{:.1%}")
    row("workers idle", figures.worker_idle, "{:.1%}")
    row("held-out accuracy (mean)", figures.heldout, "{:.1%}")
    row("  standard deviation over seeds", figures.heldout_spread, "{:.1%}")
    row("largest staleness", figures.staleness_max, "{:.0f}")
    table.add_row("speed-up, median of seeds", "1.00", f"{figures.pipelined_speedup:.2f}")
    return table

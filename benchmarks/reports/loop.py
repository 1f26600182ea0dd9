"""``deltawire bench loop``: the same job alternating and pipelined, on the same two cores.

Alternating is the staleness bound 0: a step's groups are sampled at its own version, then the
workers wait for the next one (`deltawire.rl.control.admission` derives it). Pipelined is the
configured bound. The trainer is pinned to one core and the workers to the other, so that both modes
get the same share of the machine; the modes alternate over the seeds, so that a slow hour affects
both.

It also prints figures that need no run, and with ``--seeds 0`` only these: the cost of the loop
(`benchmarks.loop_cost`) and the trainer's simulated idle time (`benchmarks.loop_idle`).
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median, stdev, variance
from typing import get_args, get_type_hints

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.loop_cost import measure_loop_cost, measure_rollouts_at_once
from benchmarks.loop_idle import simulate_idle
from deltawire.config import RunConfig, StalenessConfig, TrainConfig, load_config
from deltawire.dashboard.summary import Summary
from deltawire.errors import InputError
from deltawire.launch.session import Job, Pins, execute
from deltawire.store import open_bucket

WAYS = ("alternating", "pipelined")


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """One figure in both modes."""

    alternating: float
    pipelined: float


class CostFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The part that needs no run. ``trainer_idle_simulated`` is the worst over staleness policies,
    whose own are in ``idle_by_policy``; ``dropped_by_policy`` are shares of the groups that
    finished. The overhead is processor time; ``overhead_clock_ms`` is by the clock."""

    trainer_idle_simulated: float
    idle_by_policy: dict[str, float]
    dropped_by_policy: dict[str, float]
    rollouts_at_once: int
    rollouts_at_once_seconds: float
    overhead_ms_per_group: float
    overhead_worker_ms: float
    overhead_trainer_ms: float
    overhead_clock_ms: float


class RunFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over the seeds; ``pipelined_speedup`` is that of the ratios within one seed.

    ``update_latency_ms`` is the time from an optimizer step to a worker that serves its version
    (`deltawire.dashboard.latency_figures`), and ``groups_per_s`` counts tasks that workers
    finished. Idle shares, and accuracies in 0 … 1; ``heldout_spread`` is the standard deviation
    over seeds,
    ``heldout_standard_error`` that of the difference between the two modes' means.
    """

    pipelined_speedup: float
    speedups: list[float]
    heldout_async_minus_sync: float
    heldout_standard_error: float | None
    steps_per_minute: Pair
    groups_per_s: Pair
    update_latency_ms: Pair
    update_latency_p95_ms: Pair
    trainer_idle: Pair
    worker_idle: Pair
    heldout: Pair
    heldout_spread: Pair
    staleness_max: Pair
    seeds: int
    pinned: bool


def run(arguments: argparse.Namespace) -> int:
    """Runs every seed in both modes and prints the figures."""
    path = Path(arguments.config)
    config = load_config(path)
    console = Console(stderr=True)
    if arguments.seeds < 0:
        raise InputError("--seeds must not be negative")
    console.print("the loop's own cost", style="bold")
    costs = _costs(config)
    if not arguments.seeds:
        _print(costs, None, as_json=arguments.json)
        return 0
    results: dict[str, list[Summary]] = {way: [] for way in WAYS}
    for seed in range(arguments.seeds):
        for way in WAYS if seed % 2 == 0 else reversed(WAYS):
            console.print(f"seed {seed}, {way}", style="bold")
            out = Path(arguments.out) / f"{way}-{seed}"
            results[way].append(_one(config, way, seed, out, console))
    _print(costs, _figures(results, arguments.seeds), as_json=arguments.json)
    return 0


def _print(costs: CostFigures, runs: RunFigures | None, *, as_json: bool) -> None:
    if as_json:
        both = msgspec.to_builtins(costs) | (msgspec.to_builtins(runs) if runs else {})
        Console().print_json(data=both)
        return
    Console().print(_cost_table(costs))
    if runs:
        Console().print(_table(runs))


def _costs(config: RunConfig) -> CostFigures:
    """Simulated with a step of sixteen groups at staleness 4; the cost with the configuration's
    own groups."""
    torch.set_num_threads(1)
    idle = {}
    for policy in get_args(get_type_hints(StalenessConfig)["policy"]):
        train = TrainConfig(
            groups_per_step=16, max_staleness=4, staleness=StalenessConfig(policy=policy)
        )
        idle[policy] = simulate_idle(train)
    at_once = measure_rollouts_at_once()
    cost = measure_loop_cost(config)
    return CostFigures(
        trainer_idle_simulated=max(found.trainer_idle for found in idle.values()),
        idle_by_policy={policy: found.trainer_idle for policy, found in idle.items()},
        dropped_by_policy={policy: found.dropped for policy, found in idle.items()},
        rollouts_at_once=at_once.most,
        rollouts_at_once_seconds=at_once.seconds,
        overhead_ms_per_group=cost.total_ms,
        overhead_worker_ms=cost.worker_ms,
        overhead_trainer_ms=cost.trainer_ms,
        overhead_clock_ms=cost.clock_ms,
    )


def _cost_table(costs: CostFigures) -> Table:
    table = Table("", "", title="bench loop, without a run", box=None)
    for policy, share in costs.idle_by_policy.items():
        dropped = costs.dropped_by_policy[policy]
        table.add_row(
            f"trainer idle, simulated, {policy}", f"{share:.1%}, {dropped:.1%} of groups dropped"
        )
    seconds = costs.rollouts_at_once_seconds
    table.add_row("fifty-turn rollouts at once", f"{costs.rollouts_at_once} in {seconds:.1f} s")
    table.add_row(
        "overhead a group, processor time",
        f"{costs.overhead_ms_per_group:.2f} ms ({costs.overhead_clock_ms:.2f} ms by the clock)",
    )
    return table


def _one(config: RunConfig, way: str, seed: int, out: Path, console: Console) -> Summary:
    """One run in a fresh place; the seed's warm start is made once and used in both modes."""
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


def _figures(results: dict[str, list[Summary]], seeds: int) -> RunFigures:
    alternating, pipelined = results["alternating"], results["pipelined"]
    ratios = [
        (fast.steps_per_minute or 0.0) / (slow.steps_per_minute or 1.0)
        for slow, fast in zip(alternating, pipelined, strict=True)
    ]

    def accuracies(runs: list[Summary]) -> list[float]:
        return [run.heldout.last or 0.0 for run in runs]

    def pair(figure: dict[str, float]) -> Pair:
        return Pair(alternating=figure["alternating"], pipelined=figure["pipelined"])

    def middle(of: Callable[[Summary], float | None]) -> Pair:
        return pair({way: median(of(run) or 0.0 for run in results[way]) for way in WAYS})

    spreads = {way: accuracies(results[way]) for way in WAYS}
    error = None
    if seeds > 1:
        error = math.sqrt(sum(variance(values) / seeds for values in spreads.values()))
    return RunFigures(
        pipelined_speedup=median(ratios),
        speedups=ratios,
        heldout_async_minus_sync=fmean(spreads["pipelined"]) - fmean(spreads["alternating"]),
        heldout_standard_error=error,
        steps_per_minute=middle(lambda run: run.steps_per_minute),
        groups_per_s=middle(lambda run: run.groups_per_s),
        update_latency_ms=middle(lambda run: run.update_latency_ms),
        update_latency_p95_ms=middle(lambda run: run.update_latency_p95_ms),
        trainer_idle=middle(lambda run: run.idle.trainer),
        worker_idle=middle(lambda run: run.idle.workers),
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


def _table(figures: RunFigures) -> Table:
    table = Table(
        "", "alternating", "pipelined", title=f"bench loop, {figures.seeds} seeds", box=None
    )

    def row(label: str, pair: Pair, form: str) -> None:
        table.add_row(label, form.format(pair.alternating), form.format(pair.pipelined))

    row("steps a minute (median)", figures.steps_per_minute, "{:.1f}")
    row("tasks a second", figures.groups_per_s, "{:.2f}")
    row("update latency, median, ms", figures.update_latency_ms, "{:.0f}")
    row("update latency, 95th percentile, ms", figures.update_latency_p95_ms, "{:.0f}")
    row("trainer idle", figures.trainer_idle, "{:.1%}")
    row("workers idle", figures.worker_idle, "{:.1%}")
    row("held-out accuracy (mean)", figures.heldout, "{:.1%}")
    row("  standard deviation over seeds", figures.heldout_spread, "{:.1%}")
    error = figures.heldout_standard_error
    if error is not None:
        difference = figures.heldout_async_minus_sync
        table.add_row("  difference of the means", "", f"{difference:+.1%} ± {error:.1%}")
    row("largest staleness", figures.staleness_max, "{:.0f}")
    table.add_row("speed-up, median of seeds", "1.00", f"{figures.pipelined_speedup:.2f}")
    return table

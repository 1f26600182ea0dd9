"""``deltawire simulate``: the live loop with simulated users, on this machine."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from deltawire.cli.arguments import add_json, add_seed
from deltawire.cli.exit_codes import HARMED, INTERRUPTED
from deltawire.display import safe_line

if TYPE_CHECKING:
    from deltawire.dashboard.simulation import SimulationReport
    from deltawire.launch.simulate import PlannedRelease


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "simulate", help="serve simulated users, learn from them, and report what they thought"
    )
    parser.set_defaults(call=run)
    parser.add_argument("config", help="a TOML file such as examples/live.toml")
    parser.add_argument("--out", default="", metavar="DIR", help="default: runs/ and the name")
    parser.add_argument(
        "--seconds", type=float, default=180.0, help="how long users come (default: 180)"
    )
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second (default: 20)")
    parser.add_argument(
        "--requests",
        type=int,
        metavar="N",
        help="send N requests instead, at most --rate a second: on a slow machine users wait",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print what this amounts to, and start nothing"
    )
    add_seed(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Simulates, and prints the report."""
    import msgspec

    from deltawire.launch.processes import read_config
    from deltawire.launch.simulate import (
        SimulationOptions,
        derived,
        planned_release,
        report_to_stderr,
        simulate,
    )

    path = Path(arguments.config)
    config = read_config(path, seed=arguments.seed)
    options = SimulationOptions(
        out=Path(arguments.out or f"runs/{config.name}"),
        seconds=arguments.seconds,
        rate=arguments.rate,
        requests=arguments.requests,
        seed=arguments.seed,
    )
    if arguments.dry_run:
        rows, plan = derived(config, options), planned_release(config, options)
        if arguments.json:
            print(json.dumps({**rows, "release": msgspec.to_builtins(plan)}))  # noqa: T201
        else:
            for name, value in rows.items():
                print(f"{name.replace('_', ' '):20} {value:.4g}")  # noqa: T201
            _show_plan(plan)
        return 0
    try:
        report = simulate(config, path, options, report_line=report_to_stderr)
    except KeyboardInterrupt:
        if not (bucket := options.out / "bucket").is_dir():
            raise
        report_to_stderr(
            safe_line(f"interrupted; stored until then: {bucket} (deltawire report {bucket})")
        )
        return INTERRUPTED
    if arguments.json:
        print(msgspec.json.encode(report).decode())  # noqa: T201
    else:
        _show(report, options.out)
    for failure in report.failures:
        report_to_stderr(f"failed: {failure}")
    return HARMED if report.failures else 0


def _show(report: SimulationReport, out: Path) -> None:
    from deltawire.dashboard.simulation import lines_of

    for name, text in lines_of(report):
        print(f"{name:32} {text}")  # noqa: T201
    print(f"picture: {out / 'live.svg'}")  # noqa: T201


def _show_plan(plan: PlannedRelease | None) -> None:
    if plan is None:
        return
    print(  # noqa: T201
        f"a candidate better by {plan.effect:g} is promoted with power {plan.power:g}, margin "
        f"{plan.margin:g}, error rate {plan.error_rate:g}:"
    )
    for stage in plan.stages:
        needs = "more users than there are"
        if stage.answers is not None and stage.minutes is not None:
            needs = f"{stage.answers} answers, {stage.minutes:.1f} minutes"
        print(f"  {stage.share:.0%} of users: {stage.outcomes} outcomes, {needs}")  # noqa: T201
    end = "never" if plan.minutes is None else f"after {plan.minutes:.1f} minutes"
    print(f"  100% of users: {end}")  # noqa: T201

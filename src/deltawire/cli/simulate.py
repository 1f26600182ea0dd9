"""``deltawire simulate``: the live loop with simulated users, on this machine."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from deltawire.cli.arguments import add_json, add_seed


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
        "--dry-run", action="store_true", help="print what this amounts to, and start nothing"
    )
    add_seed(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Simulates, and prints the report."""
    import msgspec

    from deltawire.dashboard.simulation import lines_of
    from deltawire.launch.processes import read_config
    from deltawire.launch.simulating import SimulationOptions, derived, report_to_stderr, simulate

    path = Path(arguments.config)
    config = read_config(path, seed=arguments.seed)
    options = SimulationOptions(
        out=Path(arguments.out or f"runs/{config.name}"),
        seconds=arguments.seconds,
        rate=arguments.rate,
        seed=arguments.seed,
    )
    if arguments.dry_run:
        rows = derived(config, options)
        if arguments.json:
            print(json.dumps(rows))  # noqa: T201
        else:
            for name, value in rows.items():
                print(f"{name.replace('_', ' '):20} {value:.4g}")  # noqa: T201
        return 0
    report = simulate(config, path, options, report_line=report_to_stderr)
    if arguments.json:
        print(msgspec.json.encode(report).decode())  # noqa: T201
        return 0
    for name, text in lines_of(report):
        print(f"{name:32} {text}")  # noqa: T201
    print(f"picture: {options.out / 'live.svg'}")  # noqa: T201
    return 0

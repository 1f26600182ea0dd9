"""``deltawire report``: a run's report, written again from its bucket."""

from __future__ import annotations

import argparse
from pathlib import Path

from deltawire.cli.arguments import add_json, add_run_url, add_trust, trust_of
from deltawire.errors import InputError


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser("report", help="write a run's report again from its events")
    parser.set_defaults(call=run)
    add_run_url(parser)
    add_trust(parser)
    parser.add_argument("--out", default=".", help="the folder for report.html and report.json")
    add_json(parser, "print report.json")


def run(arguments: argparse.Namespace) -> int:
    """Writes the report and prints its figures."""
    import msgspec
    from rich.console import Console

    from deltawire.dashboard.live import screen
    from deltawire.dashboard.report import write_report
    from deltawire.launch.watching import Watcher, summary_of
    from deltawire.rl.evaluate.attestation import (
        attested,
        last_status,
        of_line,
        served_status,
    )
    from deltawire.runtime.lines import line_bucket
    from deltawire.runtime.needs import config_of
    from deltawire.runtime.trusted import open_trusted
    from deltawire.sync import read_run

    bucket = open_trusted(arguments.run, trust_of(arguments))
    config = config_of(read_run(bucket), url=bucket.url)
    out = Path(arguments.out)
    console = Console()
    watcher = Watcher(config, bucket, console, plain=True)
    watcher.read()
    verdicts = attested(bucket, served_status(bucket, config, last_status(bucket)))
    for one in config.train.adapters:
        place = line_bucket(bucket, one.name)
        verdicts += of_line(one.name, attested(place, last_status(place)))
    summary = summary_of(config, bucket, watcher, verdicts)
    try:
        write_report(summary, watcher.state, out)
    except OSError as error:
        raise InputError(
            f"cannot write to {out}: {error.strerror or error}", hint="choose --out"
        ) from error
    if arguments.json:
        console.print_json(msgspec.json.encode(summary).decode(), ensure_ascii=True)
    else:
        console.print(screen(summary, report=str(out / "report.html")))
    return 0

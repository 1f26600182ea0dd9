"""``deltawire run``: a whole run on this machine, watched and audited."""

from __future__ import annotations

import argparse
import contextlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from deltawire.cli.arguments import BUCKET, add_engine, add_job_options, add_seed, add_shape
from deltawire.cli.exit_codes import INTERRUPTED
from deltawire.engines.registry import check_engine
from deltawire.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from deltawire.config import RunConfig
    from deltawire.dashboard.summary import Summary
    from deltawire.launch.run_limits import Deadline
    from deltawire.launch.session import Job
    from deltawire.runtime.children import Launcher


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser("run", help="start or continue a whole run on this machine")
    parser.set_defaults(call=run)
    parser.add_argument("config", metavar="CONFIG.toml", help="the run's configuration")
    parser.add_argument("--out", default="", help="the run's folder (default: runs/NAME)")
    parser.add_argument("--bucket", default="", help=f"{BUCKET} (default: OUT/bucket)")
    add_seed(parser)
    add_engine(parser)
    add_shape(parser)
    parser.add_argument(
        "--launcher",
        choices=("local", "ray"),
        default="local",
        help="where processes run: on this machine, or on a Ray cluster (default: local)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check model, tasks and trust, print what differs from the defaults and the memory "
        "that is needed, and stop",
    )
    parser.add_argument("--all", action="store_true", help="with --dry-run: print every setting")
    add_job_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs a job; 0 once every live worker was found to hold the trainer's weights."""
    import msgspec
    from rich.console import Console

    from deltawire.config.served import served_precision
    from deltawire.dashboard.live import screen
    from deltawire.launch.checks import check_start, check_tasks, warnings_of
    from deltawire.launch.processes import read_config, refuse_memory
    from deltawire.launch.role_keys import RunKeys, refuse_signed
    from deltawire.launch.run_limits import deadline_of
    from deltawire.launch.session import Job, check_audit, only_one, open_output
    from deltawire.runtime.trusted import ReaderTrust, trusted
    from deltawire.wire.roles import SUPERVISOR_ROLE

    path = Path(arguments.config)
    deadline = deadline_of(arguments.max_hours, arguments.max_dollars, arguments.hourly_dollars)
    config = read_config(path, seed=arguments.seed, engine=arguments.engine, shape=arguments.shape)
    if config.midtrain is not None and arguments.command == "run":
        raise InputError(
            f"{path} has a [midtrain] section", hint="start it with deltawire midtrain"
        )
    out = Path(arguments.out or f"runs/{config.name}")
    console = Console(stderr=arguments.json)
    if arguments.dry_run:
        check_start(config)
        check_tasks(config)
        _print_config(console, config, out, as_json=arguments.json, everything=arguments.all)
        if not arguments.json:
            _print_memory(console, config)
            for line in warnings_of(config):
                console.print(f"warning: {line}", soft_wrap=True, markup=False, emoji=False)
        return 0
    for line in warnings_of(config):
        console.print(f"warning: {line}", soft_wrap=True, markup=False, emoji=False)
    if config.rollout.workers:
        check_engine(config.rollout.engine)
    bucket = open_output(out, arguments.bucket)
    refuse_memory(bucket)
    with only_one(out), _launcher(arguments, config) as launcher:
        keys = RunKeys(bucket, Path(arguments.key), out / "keys") if arguments.key else None
        refuse_signed(bucket, keys)
        if keys is not None:
            trust = ReaderTrust(keys.pin, allow_rollback=arguments.allow_rollback)
            signer = keys.signer(SUPERVISOR_ROLE)
            bucket = trusted(bucket, trust, signer=signer, role=SUPERVISOR_ROLE)
            console.print(f"signed run {keys.pin}", soft_wrap=True, markup=False, emoji=False)
        if (served := served_precision(config)).differs:
            console.print(served.words, soft_wrap=True, markup=False, emoji=False)
        job = Job(config, path, arguments.seed, out, bucket, engine=arguments.engine, keys=keys)
        job.write_shape()
        summary = _execute(arguments, job, console, launcher=launcher, deadline=deadline)
        if summary is None:
            return INTERRUPTED
    if arguments.json:
        Console().print_json(msgspec.json.encode(summary).decode(), ensure_ascii=True)
    else:
        console.print(screen(summary, report=str(out / "report.html")))
    check_audit(summary)
    return 0


def _execute(
    arguments: argparse.Namespace,
    job: Job,
    console: Console,
    *,
    launcher: Launcher | None,
    deadline: Deadline | None,
) -> Summary | None:
    """Runs the job within its limits, and tells --notify of a failure, a stall or a limit."""
    from deltawire.errors import DeltawireError
    from deltawire.launch.run_limits import notify
    from deltawire.launch.session import execute

    plain = arguments.plain or not console.is_terminal
    event = reason = ""

    def report(event: str, reason: str) -> None:
        fault = notify(arguments.notify, event=event, run=job.bucket.url, reason=reason)
        if fault:
            console.print(f"warning: {fault}", soft_wrap=True, markup=False, emoji=False)

    try:
        summary = execute(
            job, console, plain=plain, launcher=launcher, deadline=deadline,
            on_stall=partial(report, "stalled"),
        )  # fmt: skip
        if summary is None and deadline is not None and deadline.reached:
            event, reason = "limit", "the limit of hours or dollars is reached"
            console.print(reason)
    except DeltawireError as error:
        event, reason = "failed", str(error)
        raise
    finally:
        if event:
            report(event, reason)
    return summary


def _launcher(
    arguments: argparse.Namespace, config: RunConfig
) -> contextlib.AbstractContextManager[Launcher | None]:
    """Opens the launcher that the options ask for."""
    if arguments.launcher == "local":
        return contextlib.nullcontext()
    from deltawire.launch.ray_launcher import RayLauncher

    return contextlib.closing(RayLauncher.open(config))


def _print_memory(console: Console, config: RunConfig) -> None:
    from deltawire.plan.run_memory import GIB, memory_of
    from deltawire.runtime.memory import UNLIMITED, available_host_bytes

    found = memory_of(config)
    if found is None:
        console.print("No memory is predicted for this run; deltawire shapes MODEL plans for GPUs.")
        return
    console.print("Predicted memory, in GiB:")
    for line in found.lines():
        console.print(f"  {line}", soft_wrap=True, markup=False, emoji=False)
    free = available_host_bytes()
    if free != UNLIMITED:
        few = free < found.total
        words = f"{'warning: only ' if few else ''}{free / GIB:.1f} GiB are free on this machine"
        console.print(f"  {words}", markup=False, emoji=False)


def _print_config(
    console: Console, config: RunConfig, out: Path, *, as_json: bool, everything: bool
) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from deltawire.config import RunConfig, flatten
    from deltawire.display import redact, safe_line

    flat = {**redact(flatten(config)), "out": str(out)}
    if as_json:
        Console().print_json(data=flat, ensure_ascii=True)
        return
    flat["shape"] = config.shape.get("name", "")
    defaults = flatten(RunConfig(name=config.name))
    own = [key for key, value in flat.items() if key not in defaults or defaults[key] != value]
    rest = [key for key in flat if key not in own]
    title = Text(f"deltawire run {safe_line(config.name)}")
    table = Table("key", "value", title=title, title_justify="left")
    for key in [*own, *rest] if everything else own:
        value = flat[key]
        shown = repr(value) if isinstance(value, str) else str(value)
        table.add_row(key, Text(safe_line(shown)), end_section=key == own[-1])
    console.print(table)
    if not everything:
        console.print(f"{len(rest)} settings have their defaults; --all prints them.")
    if config.budget.controller == "auto":
        from deltawire.rl.budget.limits import BudgetLimits

        console.print(Text(f"The controller may move {safe_line(BudgetLimits.of(config).line)}."))

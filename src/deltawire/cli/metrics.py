"""``deltawire metrics``: a run's figures for Prometheus, or for an experiment tracker."""

from __future__ import annotations

import argparse
import secrets
import time
from pathlib import Path

from rich.console import Console

from deltawire.cli.serve import read_token
from deltawire.dashboard.state import RunState
from deltawire.dashboard.status import Watch
from deltawire.errors import InputError
from deltawire.runtime.event_tail import EventTail
from deltawire.runtime.fleet import read_trainer
from deltawire.store import Bucket, open_bucket
from deltawire.sync import require_run
from deltawire.sync.chain.objects import with_retries
from deltawire.wire.run import Run

OVER = frozenset({"finished", "stopped"})


def metrics(arguments: argparse.Namespace) -> int:
    """Serve, or with ``--to`` hand on, until interrupted; handing on ends with the run."""
    if not 0 < arguments.every <= 1e9:
        raise InputError(f"--every {arguments.every} is not a number of seconds")
    if not 0 <= arguments.port <= 65535:
        raise InputError(f"--port {arguments.port} is no port")
    bucket = open_bucket(arguments.run)
    run = require_run(bucket)
    if arguments.to:
        return _forward(arguments, bucket, run)
    return _serve(arguments, bucket, run)


def _serve(arguments: argparse.Namespace, bucket: Bucket, run: Run) -> int:
    from deltawire.dashboard.exporter import RunCollector, application, listen

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    token = "" if arguments.no_token else read_token(arguments.token_file)
    if not token and not arguments.no_token:
        token = secrets.token_urlsafe(24)
        console.print(f"token {token}", markup=False)
    watch = Watch(bucket, window_s=arguments.window)
    collector = RunCollector(watch, every_s=arguments.every)
    app = application(collector, token=token)
    with listen(app, host=arguments.host, port=arguments.port, token=token) as server:
        host, port = server.server_address[:2]
        console.print(f"metrics of {run.name} on http://{host!s}:{port}/metrics", markup=False)
        server.serve_forever()
    return 0


def _forward(arguments: argparse.Namespace, bucket: Bucket, run: Run) -> int:
    from deltawire.dashboard.trackers import Forwarder, open_tracker

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    tracker = open_tracker(
        arguments.to,
        Path(arguments.out or f"runs/{run.name}-{arguments.to}"),
        project=arguments.project,
        name=run.name,
        config=run.config,
        offline=arguments.offline,
    )
    tail, state, forwarder = EventTail(bucket), RunState(), Forwarder(tracker)
    try:
        while True:
            trainer = with_retries(lambda: read_trainer(bucket))
            over = trainer is not None and trainer.phase in OVER
            state.fold(tail.read(everything=over))
            version = forwarder.forward(state, over=over)
            if over:
                break
            time.sleep(arguments.every)
    finally:
        tracker.close()
    console.print(f"versions up to {version} handed on to {arguments.to}")
    return 0

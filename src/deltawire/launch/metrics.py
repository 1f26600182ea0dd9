"""Serves a run's figures to Prometheus, or forwards them to an experiment tracker."""

from __future__ import annotations

import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from deltawire.dashboard.state import RunState
from deltawire.dashboard.status import Watch
from deltawire.display import legible, redact, safe_line
from deltawire.errors import InputError
from deltawire.launch.tokens import read_token
from deltawire.runtime.event_tail import EventTail
from deltawire.runtime.fleet import known_trainer
from deltawire.runtime.trusted import ANY, ReaderTrust, open_trusted
from deltawire.store import without_retries
from deltawire.sync import read_run

OVER = frozenset({"finished", "stopped"})


@dataclass(frozen=True, kw_only=True)
class Listener:
    """Where the exporter listens, and who may read: anyone on this machine with ``open``."""

    host: str = "127.0.0.1"
    port: int = 9464
    token_file: str = ""
    open: bool = False


@dataclass(frozen=True, kw_only=True)
class Destination:
    """The tracker that figures are forwarded to; ``folder`` is for its own files."""

    kind: str
    folder: str = ""
    project: str = "deltawire"
    offline: bool = False


def _check_interval(every_s: float) -> None:
    if not 0 < every_s <= 1e9:
        raise InputError(f"--every {every_s} is not a number of seconds above 0")


def export_metrics(
    location: str,
    listener: Listener,
    *,
    every_s: float = 5.0,
    window_s: float = 300.0,
    trust: ReaderTrust = ANY,
) -> None:
    """Serves ``/metrics`` until interrupted; the bucket is read at most every ``every_s``."""
    from deltawire.dashboard.exporter import RunCollector, application, listen

    _check_interval(every_s)
    if not 0 <= listener.port <= 65535:
        raise InputError(f"--port {listener.port} is not a port", hint="use 0 to 65535")
    bucket = open_trusted(location, trust)
    run = read_run(bucket)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    token = "" if listener.open else read_token(listener.token_file)
    if not token and not listener.open:
        token = secrets.token_urlsafe(24)
        console.print(f"token {token}", markup=False, emoji=False)
    watch = Watch(without_retries(bucket), window_s=window_s, retrying=bucket)
    collector = RunCollector(watch, every_s=every_s)
    app = application(collector, token=token)
    with listen(app, host=listener.host, port=listener.port, token=token) as server:
        host, port = server.server_address[:2]
        line = f"metrics of {run.name} on http://{host!s}:{port}/metrics"
        console.print(safe_line(line), markup=False, emoji=False)
        server.serve_forever()


def _file_name(name: str) -> str:
    """Makes a part of a path from a run's name, which the bucket's writers choose."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip(".") or "run"


def forward_metrics(
    location: str, destination: Destination, *, every_s: float = 5.0, trust: ReaderTrust = ANY
) -> None:
    """Forward each version's figures to a tracker until the run is over."""
    from deltawire.dashboard.trackers import Forwarder, open_tracker

    _check_interval(every_s)
    bucket = open_trusted(location, trust)
    run = read_run(bucket)
    tracker = open_tracker(
        destination.kind,
        Path(destination.folder or f"runs/{_file_name(run.name)}-{destination.kind}"),
        project=destination.project,
        name=legible(run.name, 64),
        config=redact(run.config),
        offline=destination.offline,
    )
    tail, state, forwarder = EventTail(without_retries(bucket)), RunState(), Forwarder(tracker)
    try:
        while True:
            trainer = known_trainer(bucket)
            over = trainer is not None and trainer.phase in OVER
            state.add(tail.read(everything=over))
            version = forwarder.forward(state, over=over)
            if over:
                break
            time.sleep(every_s)
    finally:
        tracker.close()
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"forwarded versions up to {version} to {destination.kind}")

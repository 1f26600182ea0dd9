"""Exports a run's figures to Prometheus, over HTTP with a bearer token.

Concurrency::

    scraper ── GET /metrics ──▶ a thread of the server ─▶ the last status, if it is fresh enough,
                                                          else a new one (one thread at a time)

The run is read when a scraper asks, and at most once every so often. A test compares the names with
docs/WATCHING.md.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import ThreadingWSGIServer

from deltawire.bearer import bears
from deltawire.dashboard.figure import Figure
from deltawire.dashboard.figures import FIGURES
from deltawire.dashboard.status import RunStatus, Watch
from deltawire.display import legible
from deltawire.errors import DeltawireError, InputError
from deltawire.wire.status import StoreTraffic

MAX_LABELS = 64
"""Most causes and probes that are exported, and a sixteenth of the most processes: each label is a
time series that cost money to store."""
REQUEST_S = 10.0
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})

Start = Callable[[str, list[tuple[str, str]]], Any]
Application = Callable[[dict[str, Any], Start], Iterable[bytes]]


class RunCollector:
    """Turns a `RunStatus` that is at most ``every_s`` old into metrics."""

    def __init__(
        self, watch: Watch, *, every_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._watch = watch
        self._every_s = every_s
        self._clock = clock
        self._lock = threading.Lock()
        self._looked_at = float("-inf")
        self._status: RunStatus | None = None

    def poll(self) -> RunStatus | None:
        """Returns the run's status, None if it could not be read."""
        with self._lock:
            if self._clock() - self._looked_at >= self._every_s:
                try:
                    self._status = self._watch.poll()
                except DeltawireError:
                    self._status = None
                self._looked_at = self._clock()
            return self._status

    def describe(self) -> list[Metric]:
        """Returns nothing, so that registering the collector does not read the store."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yields every metric; figures that were not measured are left out."""
        status = self.poll()
        yield GaugeMetricFamily(
            "deltawire_up", "1 if the run could be read", value=float(status is not None)
        )
        if status is None:
            return
        yield InfoMetricFamily(
            "deltawire_run",
            "The run",
            value={"name": legible(status.name, 64), "phase": legible(status.phase, 64)},
        )
        yield from _measured(status)
        yield from _standing(status)
        yield from _processes(status)
        yield from _traffic(status)
        yield from _readers(status)


def _measured(status: RunStatus) -> Iterator[Metric]:
    """A gauge for each metric of the table of figures; its labelled rows make one family."""
    families: dict[str, list[Figure]] = {}
    for row in FIGURES:
        if row.metric:
            families.setdefault(row.metric, []).append(row)
    for name, rows in families.items():
        values = [(row, _base_unit(row, attrgetter(row.name)(status))) for row in rows]
        labels = [label for label, _ in rows[0].labels]
        yield _gauge(
            name,
            rows[0].help,
            labels,
            ((tuple(text for _, text in row.labels), value) for row, value in values),
        )


def _base_unit(row: Figure, value: float | None) -> float | None:
    """Prometheus wants seconds."""
    return value / 1e3 if value is not None and row.unit == "ms" else value


def _gauge(
    name: str, text: str, labels: list[str], values: Iterable[tuple[tuple[str, ...], float | None]]
) -> Metric:
    family = GaugeMetricFamily(f"deltawire_{name}", text, labels=labels)
    for of, value in values:
        if value is not None:
            family.add_metric(list(of), float(value))
    return family


def _standing(status: RunStatus) -> Iterator[Metric]:
    """Metrics of the bucket's own objects."""
    figures: list[tuple[str, str, float | None]] = [
        ("version", "The newest committed version", status.version),
        ("version_target", "The last version that the run will make", status.target),
        ("staleness_bound", "The largest staleness allowed", status.staleness.bound),
        ("problems", "Objects of the run that could not be read", len(status.problems)),
    ]
    for name, text, value in figures:
        yield _gauge(name, text, [], [((), value)])
    yield _gauge(
        "groups",
        "Groups granted and not stored, and stored",
        ["state"],
        [(("in_flight",), status.groups_in_flight), (("stored",), status.groups_stored)],
    )
    held = {name: float(version) for name, version in status.lines.items() if version is not None}
    text = "The newest version in each further precision"
    yield _gauge("line_version", text, ["line"], _merged(held))
    causes = _merged(status.failures)
    served = _merged(status.gateways)
    yield _gauge("gateways", "Counters and rates of the live gateways", ["counter"], served)
    yield from _release(status)
    yield from _thinking(status)
    yield _gauge("failures", "Recent failures, by cause", ["cause"], causes)
    found = {(legible(i.worker, 80), legible(i.kind, 80)): i.count for i in status.incidents}
    named = [(labels, float(count)) for labels, count in found.items()][:MAX_LABELS]
    yield _gauge("incidents", "Incidents that no honest worker causes", ["worker", "kind"], named)
    quarantined = len({one.worker for one in status.incidents if one.quarantined})
    yield _gauge("workers_quarantined", "Workers whose groups are refused", [], [((), quarantined)])
    yield _gauge("probe", "Probes that the reward does not see", ["probe"], _merged(status.probes))


def _thinking(status: RunStatus) -> Iterator[Metric]:
    """Metrics of thinking budgets and of reused tokens."""
    figures = (
        ("thinking_tokens", "Mean tokens of thinking in a turn, newest step", "thinking_length"),
        ("forced_close_share", "Share of turns closed by force, newest step", "forced_share"),
        ("reused_tokens", "Mean tokens of an episode that another drew", "reused_length"),
    )
    for name, text, field in figures:
        yield _gauge(name, text, [], [((), getattr(status, field))])
    scores = {str(one.budget): one for one in status.heldout_budgets[:MAX_LABELS]}
    of_budgets = (
        ("budget_accuracy", "Held-out accuracy with a thinking budget", "accuracy"),
        ("budget_tokens", "Mean tokens of a held-out answer with a thinking budget", "tokens"),
        ("budget_forced_share", "Share of held-out answers closed by force", "forced"),
    )
    for name, text, field in of_budgets:
        values = [((budget,), getattr(one, field)) for budget, one in scores.items()]
        yield _gauge(f"heldout_{name}", text, ["budget"], values)


def _release(status: RunStatus) -> Iterator[Metric]:
    """Metrics of the decisions about which version serves; none without decisions."""
    release = status.release
    if release is None:
        return
    undecided = release.candidate is not None and release.verdict != "rollback"
    arms: list[tuple[tuple[str, ...], float | None]] = [
        (("serving",), release.serving),
        (("candidate",), release.candidate if undecided else None),
    ]
    text = "The version that serves live users, and the candidate"
    yield _gauge("release_version", text, ["arm"], arms)
    yield _gauge(
        "release_share", "Share of users that see the candidate", [], [((), release.share)]
    )
    text = "Share of requests that the candidate answers too, unseen by users"
    yield _gauge("release_copies", text, [], [((), release.copies)])
    text = "Metric of the version that serves less that of the hold-back version"
    yield _gauge("release_hold_back_difference", text, [], [((), release.hold_back_difference)])
    text = "1 if users were returned to the hold-back version"
    yield _gauge("release_decayed", text, [], [((), release.decayed is not None)])
    held = [((name,), release.waits_for == name) for name in ("data", "person")]
    yield _gauge("release_held", "1 if the candidate waits", ["for"], held)
    counts = [((name,), count) for name, count in sorted(release.decisions.items())]
    text = "Decisions about which version serves, by verdict"
    yield _gauge("release_decisions", text, ["verdict"], [*counts, (("void",), release.void)])


def _merged(values: dict[str, float] | dict[str, int]) -> list[tuple[tuple[str, ...], float]]:
    """Merges entries whose names are the same once they are made legible."""
    found: dict[str, float] = {}
    for name, value in values.items():
        shown = legible(name, 80)
        if shown in found or len(found) < MAX_LABELS:
            found[shown] = found.get(shown, 0.0) + value
    return [((name,), value) for name, value in found.items()]


def _processes(status: RunStatus) -> Iterator[Metric]:
    # Two series of the same labels would fail the whole scrape.
    named = {legible(line.name, 80): line for line in status.processes[: 16 * MAX_LABELS]}
    lines = list(named.values())
    labels = ["process", "role"]
    of = [(name, line.role or "") for name, line in named.items()]
    alive = [float(line.state == "alive") for line in lines]
    ended = [float(line.state == "ended") for line in lines]
    each: list[tuple[str, str, list[float | None]]] = [
        ("process_alive", "1 while it lives and makes progress", [*alive]),
        ("process_ended", "1 once it has ended normally", [*ended]),
        ("process_age_seconds", "Seconds since its last heartbeat", [line.age_s for line in lines]),
        (
            "process_lag_versions",
            "Newest version minus the one it holds",
            [line.lag for line in lines],
        ),
        ("process_restarts", "Restarts that were seen", [line.restarts for line in lines]),
        ("process_idle_share", "Share of its time that it waited", [line.idle for line in lines]),
    ]
    for name, text, values in each:
        yield _gauge(name, text, labels, zip(of, values, strict=True))


def _traffic(status: RunStatus) -> Iterator[Metric]:
    """Counters of what processes and readers have asked of their stores since they started."""
    of: dict[tuple[str, str, str], StoreTraffic] = {}
    for line in status.processes[: 16 * MAX_LABELS]:
        if line.traffic is not None:
            labels = (legible(line.name, 80), line.role or "", legible(line.host, 80))
            of[labels] = line.traffic
    for one in status.readers[: 16 * MAX_LABELS]:
        of[legible(one.process, 80), legible(one.kind, 80), legible(one.host, 80)] = one.traffic
    for name, text, field in (
        ("store_requests", "Requests sent to stores, repetitions included", "requests"),
        ("store_retries", "Requests that repeated an earlier one", "retries"),
        ("store_refused", "Requests that a store refused: too many", "refused"),
        ("store_read_bytes", "Bytes read from stores", "read_bytes"),
        ("store_written_bytes", "Bytes written to stores", "written_bytes"),
        ("cache_hits", "Blobs found in the host's cache", "cache_hits"),
        ("cache_misses", "Blobs fetched for the host's cache", "cache_misses"),
        ("anchors", "Whole models stored", "anchors"),
        ("pruned_versions", "Versions that retention deleted", "pruned"),
    ):
        family = CounterMetricFamily(f"deltawire_{name}", text, labels=["process", "role", "host"])
        for of_one, asked in of.items():
            family.add_metric(list(of_one), float(getattr(asked, field)))
        yield family


def _readers(status: RunStatus) -> Iterator[Metric]:
    """Metrics of pulls, relays and ranks of vLLM that have not ended."""
    present = [one for one in status.readers if one.state != "ended"][: 16 * MAX_LABELS]
    named = {
        (legible(one.process, 80), legible(one.kind, 80), legible(one.host, 80)): one
        for one in present
    }
    for name, text, field in (
        ("reader_version", "The version that it holds", "version"),
        ("reader_lag_versions", "Newest version minus the one it holds", "lag"),
        ("reader_late_seconds", "Age of the oldest version that it lacks", "late_s"),
        ("reader_age_seconds", "Seconds since its last report", "age_s"),
    ):
        values = [(labels, getattr(one, field)) for labels, one in named.items()]
        yield _gauge(name, text, ["reader", "kind", "host"], values)
    values = [(labels, float(bool(one.alarm))) for labels, one in named.items()]
    text = "1 while the engine that it attests holds other weights"
    yield _gauge("reader_alarm", text, ["reader", "kind", "host"], values)


def application(collector: RunCollector, *, token: str) -> Application:
    """Builds the WSGI application that serves ``/metrics``.

    A request needs ``token`` as its bearer token; with an empty one, everybody may read.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    inner: Any = make_wsgi_app(registry)

    def answer(environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        if environ.get("REQUEST_METHOD") != "GET":
            return _refuse(start, "405 Method Not Allowed")
        header = str(environ.get("HTTP_AUTHORIZATION", ""))  # WSGI decodes bytes as latin-1.
        header = header.encode("latin-1").decode("utf-8", "surrogateescape")
        if token and not bears(header, token):
            return _refuse(start, "401 Unauthorized", ("WWW-Authenticate", "Bearer"))
        if environ.get("PATH_INFO") != "/metrics":
            return _refuse(start, "404 Not Found")
        return list(inner(environ, start))

    return answer


def _refuse(start: Start, status: str, *headers: tuple[str, str]) -> list[bytes]:
    start(status, [("Content-Type", "text/plain"), *headers])
    return [status.encode() + b"\n"]


class _Handler(WSGIRequestHandler):
    """Logs nothing, and waits at most `REQUEST_S` for a request."""

    timeout = REQUEST_S

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - the base's name
        """Requests are not logged: they may carry a token."""


def listen(app: Application, *, host: str, port: int, token: str) -> WSGIServer:
    """Binds a server; call its ``serve_forever`` to serve.

    Raises `InputError` if it cannot listen there, or would beyond this machine without a token.
    """
    if not token and host not in LOOPBACK:
        raise InputError(
            f"listening on {host} needs a token",
            hint="leave --no-token out, or listen on 127.0.0.1",
        )
    try:
        server = make_server(host, port, app, ThreadingWSGIServer, _Handler)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"cannot listen on {host}:{port}: {reason}", hint="choose another --port"
        ) from error
    return server

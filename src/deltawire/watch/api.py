"""Answers the page's requests: each handler calls a function of a run's state, in a thread.

::

    GET /api/runs                                         the runs of this page
    GET /api/runs/{run}/overview                          status, problems, figures, notes
    GET /api/runs/{run}/series?names=&from=&to=&points=   curves by version
    GET /api/runs/{run}/timeline?from=&to=&columns=       who did what when
    GET /api/runs/{run}/groups?…                          a page of groups (`GroupQuery`), or
    GET /api/runs/{run}/groups.csv?…                      all of them as CSV
    GET /api/runs/{run}/facets                            values to filter groups by
    GET /api/runs/{run}/groups/{worker}/{sequence}        a group, its answers as messages
    GET …/answers/{answer}/tokens?from=                   figures of each token
    GET …/answers/{answer}/trainer?from=                  the trainer's figures of each token
    GET …/answers/{answer}/experts/{token}                the experts that one token chose
    GET /api/runs/{run}/versions?below=&limit=            versions, newest first
    GET /api/runs/{run}/versions/{version}?measure=       a delta by tensor
    GET /api/runs/{run}/layers?measure=&last=&count=      a value for each layer and version
    GET /api/runs/{run}/route?held=&goal=                 what a reader would fetch
    GET /api/compare                                      families of runs, and settings that differ

``{run}`` is a run's number on the page, from 0.
"""

from __future__ import annotations

import asyncio
import csv
import io
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar, get_args

import msgspec
from aiohttp import web

from deltawire.dashboard.problems import RunProblem, problems_of
from deltawire.dashboard.series import (
    FigureValue,
    Note,
    Timeline,
    figure_values,
    heldout_sets,
    heldout_sources,
    notes,
    series,
    timeline,
)
from deltawire.dashboard.status import RunStatus
from deltawire.dashboard.versions import list_versions
from deltawire.display import redact
from deltawire.errors import InputError
from deltawire.watch.compare import compare
from deltawire.watch.group_index import MAX_PAGE, GroupQuery, GroupRow
from deltawire.watch.group_view import GroupReader
from deltawire.watch.run_reader import RunReader
from deltawire.watch.trainer_scores import TrainerScores
from deltawire.watch.weights import Measure, WeightChanges, find_route
from deltawire.wire.objects import prepared

MAX_PROCESSES = 500
MAX_POINTS = 4000
MAX_COLUMNS = 2000
MAX_VERSIONS = 500
THREADS = 4

_T = TypeVar("_T")


class PageRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run in the page's list. ``relay_of`` is the number of a run on the page of which this one
    is a copy in another bucket."""

    number: int
    name: str
    id: str
    url: str
    created_at: float
    phase: str
    version: int | None
    target: int | None
    problems: int
    relay_of: int | None


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """All of the overview but curves and timeline. ``status`` covers the last minutes, ``figures``
    the whole run. ``complete`` is false while old events are still being read; ``revision`` changes
    when events arrive."""

    name: str
    url: str
    id: str
    created_at: float
    bound: int | None
    status: RunStatus | None
    processes: int
    problems: list[RunProblem]
    figures: list[FigureValue]
    notes: list[Note]
    heldout_sets: list[str]
    heldout_sources: list[str]
    complete: bool
    revision: int
    error: str
    groups: int
    versions_behind: int


class WatchedRuns:
    """The runs of a page, with what reads their parts."""

    def __init__(self, readers: Sequence[RunReader]) -> None:
        self.readers = list(readers)
        self.groups = [GroupReader(one.bucket, one.run, one.index) for one in readers]
        self.scores = [TrainerScores(one.bucket, one.run, one.config) for one in readers]
        self.weights = [WeightChanges(one.retrying, one.run) for one in readers]
        self.threads = ThreadPoolExecutor(THREADS, "watch-requests")

    def start(self) -> None:
        """Begins to read."""
        for reader in self.readers:
            reader.start()

    def close(self) -> None:
        """Ends all threads."""
        self.threads.shutdown(cancel_futures=True)
        for reader in self.readers:
            reader.close()


RUNS = web.AppKey("runs", WatchedRuns)


def add_routes(router: web.UrlDispatcher) -> None:
    """Declares the handlers."""
    run, group = "/api/runs/{run}", "/api/runs/{run}/groups/{worker}/{sequence}"
    for path, handler in (
        ("/api/runs", _list_runs),
        ("/api/compare", _compare),
        (f"{run}/overview", _overview),
        (f"{run}/series", _series),
        (f"{run}/timeline", _timeline),
        (f"{run}/groups", _groups),
        (f"{run}/groups.csv", _groups_csv),
        (f"{run}/facets", _facets),
        (group, _group),
        (f"{group}/answers/{{answer}}/tokens", _tokens),
        (f"{group}/answers/{{answer}}/trainer", _trainer),
        (f"{group}/answers/{{answer}}/experts/{{token}}", _experts),
        (f"{run}/versions", _versions),
        (f"{run}/versions/{{version}}", _version),
        (f"{run}/layers", _layers),
        (f"{run}/route", _route),
    ):
        router.add_get(path, handler)


async def _list_runs(request: web.Request) -> web.Response:
    readers = request.app[RUNS].readers
    first: dict[str, int] = {}
    for number, reader in enumerate(readers):
        first.setdefault(reader.run.id, number)
    return _json(
        [
            PageRun(
                number=number,
                name=reader.run.name,
                id=reader.run.id,
                url=_url(reader),
                created_at=reader.run.created_at,
                phase=reader.status.phase if reader.status else "",
                version=reader.status.version if reader.status else None,
                target=reader.config.train.versions if reader.config else None,
                problems=len(problems_of(reader.status)) if reader.status else 0,
                relay_of=first[reader.run.id] if first[reader.run.id] != number else None,
            )
            for number, reader in enumerate(readers)
        ]
    )


async def _compare(request: web.Request) -> web.Response:
    readers = request.app[RUNS].readers
    return await _answer(request, lambda: compare([one.run for one in readers]))


async def _overview(request: web.Request) -> web.Response:
    return await _answer(request, lambda: overview(_reader(request)))


def overview(reader: RunReader) -> Overview:
    """Returns what the overview shows of a run now."""
    status = reader.status
    lines = status.processes if status else []
    if status is not None and len(lines) > MAX_PROCESSES:
        shown = sorted(lines, key=lambda one: one.state not in ("silent", "stalled"))
        status = msgspec.structs.replace(status, processes=shown[:MAX_PROCESSES])
    return Overview(
        name=reader.run.name,
        url=_url(reader),
        id=reader.run.id,
        created_at=reader.run.created_at,
        bound=reader.bound,
        status=status,
        processes=len(lines),
        problems=problems_of(status) if status else [],
        figures=reader.ask("figures", figure_values),
        notes=reader.ask("notes", notes),
        heldout_sets=reader.ask("sets", heldout_sets),
        heldout_sources=reader.ask("sources", heldout_sources),
        complete=reader.complete,
        revision=reader.revision,
        error=reader.error,
        groups=reader.index.count,
        versions_behind=reader.indexer.behind,
    )


async def _series(request: web.Request) -> web.Response:
    names = [name for name in request.query.get("names", "").split(",") if name][:64]
    first = _number(request, "from", 0)
    last = _optional(request, "to")
    points = min(_number(request, "points", 800), MAX_POINTS)
    if points < 2:
        raise InputError("a curve has at least two points")
    reader = _reader(request)
    return await _answer(
        request,
        lambda: reader.ask(
            ("series", *names, first, last, points),
            lambda state: series(state, names, first=first, last=last, points=points),
        ),
    )


async def _timeline(request: web.Request) -> web.Response:
    opens, closes = _real(request, "from"), _real(request, "to")
    columns = max(50, min(_number(request, "columns", 900), MAX_COLUMNS))
    reader = _reader(request)

    def drawn() -> Timeline | None:
        return reader.ask(
            ("timeline", opens, closes, columns),
            lambda state: timeline(state, opens=opens, closes=closes, columns=columns),
        )

    return await _answer(request, drawn)


async def _groups(request: web.Request) -> web.Response:
    query, reader = _query(request), _reader(request)
    after = request.query.get("after", "")
    limit = max(1, min(_number(request, "limit", 50), MAX_PAGE))
    return await _answer(request, lambda: reader.index.find(query, after=after, limit=limit))


async def _groups_csv(request: web.Request) -> web.StreamResponse:
    query, reader = _query(request), _reader(request)
    response = web.StreamResponse()
    response.content_type = "text/csv"
    response.charset = "utf-8"
    await response.prepare(request)
    await response.write(_lines([GroupRow.__struct_fields__]))
    after = ""
    while True:
        page = await _in_thread(
            request, lambda: reader.index.find(query, after=after, limit=MAX_PAGE)
        )
        await response.write(_lines([msgspec.structs.astuple(row) for row in page.rows]))
        if not (after := page.next):
            break
    await response.write_eof()
    return response


async def _facets(request: web.Request) -> web.Response:
    reader = _reader(request)
    return await _answer(request, reader.index.facets)


async def _group(request: web.Request) -> web.Response:
    number, reader = _run_number(request), _reader(request)
    groups, (worker, sequence) = request.app[RUNS].groups[number], _place(request)
    first = _number(request, "from", 0)
    return await _answer(
        request,
        lambda: groups.group(worker, sequence, first=first, batch_of=reader.parity_of),
    )


async def _tokens(request: web.Request) -> web.Response:
    groups, (worker, sequence) = request.app[RUNS].groups[_run_number(request)], _place(request)
    answer, first = _in_path(request, "answer"), _number(request, "from", 0)
    return await _answer(request, lambda: groups.tokens(worker, sequence, answer, first=first))


async def _trainer(request: web.Request) -> web.Response:
    number, (worker, sequence) = _run_number(request), _place(request)
    groups, scores = request.app[RUNS].groups[number], request.app[RUNS].scores[number]
    answer, first = _in_path(request, "answer"), _number(request, "from", 0)
    return await _answer(
        request, lambda: groups.trainer(scores, worker, sequence, answer, first=first)
    )


async def _experts(request: web.Request) -> web.Response:
    groups, (worker, sequence) = request.app[RUNS].groups[_run_number(request)], _place(request)
    answer, token = _in_path(request, "answer"), _in_path(request, "token")
    return await _answer(request, lambda: groups.experts(worker, sequence, answer, token))


async def _versions(request: web.Request) -> web.Response:
    reader = _reader(request)
    below = _optional(request, "below")
    limit = max(1, min(_number(request, "limit", 50), MAX_VERSIONS))

    def found() -> list[dict[str, Any]]:
        known = reader.versions()
        rows = list_versions(reader.bucket, reader.run, limit, below=below, known=known)
        return reader.with_state(
            lambda state: [row | _published(state.published.get(row["version"])) for row in rows]
        )

    return await _answer(request, found)


def _published(event: Any) -> dict[str, Any]:
    """The part of a version's row that its publish event adds."""
    if event is None:
        return {"changed_share": None, "blocked_ms": None, "upload_ms": None}
    share = event.changed / event.elements if event.elements else None
    return {
        "changed_share": share,
        "blocked_ms": event.blocked_ms,
        "upload_ms": event.upload_ms,
    }


async def _version(request: web.Request) -> web.Response:
    weights = request.app[RUNS].weights[_run_number(request)]
    version, measure = _in_path(request, "version"), request.query.get("measure") == "1"
    return await _answer(request, lambda: weights.change(version, measure=measure))


async def _layers(request: web.Request) -> web.Response:
    weights, reader = request.app[RUNS].weights[_run_number(request)], _reader(request)
    name = request.query.get("measure", "bits")
    if name not in get_args(Measure):
        raise InputError(f"{name[:40]!r} is not a measure", hint=", ".join(get_args(Measure)))
    measure: Literal["bits", "share", "norm"] = name  # type: ignore[assignment]
    last, count = _optional(request, "last"), max(1, _number(request, "count", 32))
    return await _answer(
        request, lambda: weights.layers(measure, last=last, count=count, known=reader.versions())
    )


async def _route(request: web.Request) -> web.Response:
    reader = _reader(request)
    held, goal = _optional(request, "held"), _optional(request, "goal")
    if goal is None:
        raise InputError("a route needs a goal", hint="give goal=VERSION")
    return await _answer(
        request, lambda: find_route(reader.bucket, reader.run, held=held, goal=goal)
    )


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def _answer(request: web.Request, compute: Callable[[], object]) -> web.Response:
    return _json(await _in_thread(request, compute))


async def _in_thread(request: web.Request, compute: Callable[[], _T]) -> _T:
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(request.app[RUNS].threads, compute)


def _json(value: object) -> web.Response:
    try:
        body = msgspec.json.encode(value)
    except UnicodeEncodeError:  # Halves of characters, which JSON can spell and UTF-8 cannot.
        body = json.dumps(msgspec.to_builtins(value, str_keys=True), ensure_ascii=True).encode()
    return web.Response(body=body, content_type="application/json")


def _lines(rows: Sequence[Sequence[Any]]) -> bytes:
    """Encodes rows of CSV. A text that a spreadsheet would run as a formula gets an apostrophe."""
    out = io.StringIO()
    csv.writer(out).writerows([[_csv_value(value) for value in row] for row in rows])
    return out.getvalue().encode("utf-8", "replace")


def _csv_value(value: Any) -> Any:
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return f"'{value}"
    return "" if value is None else value


def _url(reader: RunReader) -> str:
    return str(redact(reader.bucket.url))


def _reader(request: web.Request) -> RunReader:
    reader = request.app[RUNS].readers[_run_number(request)]
    reader.touch()
    return reader


def _run_number(request: web.Request) -> int:
    number = _in_path(request, "run")
    if number >= len(request.app[RUNS].readers):
        raise web.HTTPNotFound(reason=f"the page has no run number {number}")
    return number


def _place(request: web.Request) -> tuple[str, int]:
    return request.match_info["worker"], _in_path(request, "sequence")


def _in_path(request: web.Request, name: str) -> int:
    return _whole(request.match_info[name], name)


def _number(request: web.Request, name: str, default: int) -> int:
    found = _optional(request, name)
    return default if found is None else found


def _optional(request: web.Request, name: str) -> int | None:
    text = request.query.get(name, "")
    return _whole(text, name) if text else None


def _whole(text: str, name: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise InputError(f"{name} is not a whole number from 0 upward")
    return int(text)


def _real(request: web.Request, name: str) -> float | None:
    text = request.query.get(name, "")
    try:
        value = float(text) if text else None
    except ValueError:
        raise InputError(f"{name} is not a number") from None
    if value is not None and not abs(value) < 1e15:
        raise InputError(f"{name} is not a number of a usual size")
    return value


def _query(request: web.Request) -> GroupQuery:
    known: Mapping[str, str] = {
        name: value
        for name, value in request.query.items()
        if value and name in GroupQuery.__struct_fields__
    }
    try:
        return msgspec.convert(dict(known), prepared(GroupQuery), strict=False)
    except msgspec.ValidationError as error:
        raise InputError(f"this is not a filter of groups: {error}") from error

"""Readers that do not belong to the run (pulls, relays, ranks of vLLM), as they report
themselves."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from html import escape
from typing import Literal

import msgspec
from rich.table import Table
from rich.text import Text

from deltawire.dashboard.wording import MISSING, byte_size, duration
from deltawire.display import legible
from deltawire.errors import DeltawireError, RetryError
from deltawire.runtime.reader_report import GONE_S, ReaderReports
from deltawire.store import Bucket
from deltawire.wire.status import HostReaders, ReaderReport, StoreTraffic

EVERY_S = 15.0
"""How often a view lists the reports: hosts replace theirs once a minute."""
MAX_ROWS = 20
MAX_LINES = 1024
_STYLES = {"alive": "green", "late": "yellow", "silent": "red", "ended": "dim"}

State = Literal["alive", "late", "silent", "ended"]


class ReaderLine(msgspec.Struct, frozen=True, kw_only=True):
    """One reader, as it reported ``age_s`` ago. ``late`` ones lack a version that had been there
    for `LATE_S`, and ``reason`` says why, as far as they know. Reports are not signed."""

    host: str
    process: str
    kind: str
    state: State
    version: int | None
    lag: int
    late_s: float
    reason: str
    age_s: float
    alarm: str = ""
    build: str
    traffic: StoreTraffic

    @property
    def words(self) -> str:
        """Says what the reader found wrong, or how late it is, and why; empty if it is not."""
        if self.alarm and self.state != "ended":
            return self.alarm
        if self.state != "late":
            return ""
        versions = f"{self.lag} version{'s' if self.lag != 1 else ''}"
        return f"{versions}, {duration(self.late_s)} late" + (
            f": {self.reason}" if self.reason else ""
        )


LATE_S = 60.0
"""A version takes so long to arrive in a run that is well; a reader that needs more is late."""


class ReaderWatch:
    """Reads the reports of a run's readers now and then.

    Example::

        lines = ReaderWatch(bucket).lines()
    """

    def __init__(self, bucket: Bucket, *, clock: Callable[[], float] = time.time) -> None:
        self._reports = ReaderReports(bucket, clock=clock)
        self._clock = clock
        self._listed_at = float("-inf")
        self._found: list[HostReaders] = []
        self._fault = ""

    def lines(self) -> list[ReaderLine]:
        """Returns the readers, the latest ones first; those of the last look if the store does not
        answer, or does not let this view read reports."""
        now = self._clock()
        if not 0 <= now - self._listed_at < EVERY_S:
            self._listed_at = now
            try:
                self._found, self._fault = self._reports.poll(), ""
            except RetryError:
                pass
            except DeltawireError as error:
                self._fault = f"reports of readers: {error}"
        lines = [_line(report.host, one, now) for report in self._found for one in report.readers]
        lines.sort(key=lambda one: (one.state == "ended", -one.late_s, one.host, one.process))
        return lines[:MAX_LINES]

    @property
    def problems(self) -> list[str]:
        """Reports that cannot be read."""
        found = [str(error) for error in self._reports.errors]
        return [self._fault, *found] if self._fault else found


def _line(host: str, one: ReaderReport, now: float) -> ReaderLine:
    age_s = max(0.0, now - one.at)
    state: State = "alive"
    if one.ended:
        state = "ended"
    elif age_s > GONE_S:
        state = "silent"
    elif one.late_s > LATE_S:
        state = "late"
    return ReaderLine(
        host=host, process=one.process, kind=one.kind, state=state,
        version=one.version if one.version >= 0 else None, lag=one.lag, late_s=one.late_s,
        reason=one.reason, age_s=age_s, alarm=one.alarm, build=one.build, traffic=one.traffic,
    )  # fmt: skip


def reader_table(lines: Sequence[ReaderLine]) -> Table:
    """A row for each of the first readers: what it holds, and what it asked of its stores."""
    table = Table(box=None, expand=True, padding=(0, 1), header_style="dim", pad_edge=True)
    for heading in ("reader", "state"):
        table.add_column(heading, ratio=4)
    for heading in ("version", "lag", "read", "requests", "repeated", "refused"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in lines[:MAX_ROWS]:
        state = Text.assemble(("● ", _STYLES[one.state]), legible(one.words, 200) or one.state)
        if one.state == "silent":
            state.append(f" for {duration(one.age_s)}")
        asked = one.traffic
        table.add_row(
            Text(f"{legible(one.host, 40)} {legible(one.process, 40)}"),
            state,
            Text(MISSING if one.version is None else str(one.version)),
            str(one.lag),
            byte_size(asked.read_bytes),
            *(f"{value:,}" for value in (asked.requests, asked.retries, asked.refused)),
        )
    if len(lines) > MAX_ROWS:
        table.add_row(Text(f"and {len(lines) - MAX_ROWS} more", "dim"))
    return table


def readers_card(lines: Sequence[ReaderLine]) -> str:
    """The readers for ``report.html``; empty without any."""
    if not lines:
        return ""
    names = ("Reader", "State", "Version", "Lag", "Read", "Requests", "Repeated", "Refused")
    heads = "".join(
        f'<th class="number">{name}</th>' if number > 1 else f"<th>{name}</th>"
        for number, name in enumerate(names)
    )
    rows = ""
    for one in lines[:MAX_ROWS]:
        asked = one.traffic
        figures = (
            MISSING if one.version is None else str(one.version),
            str(one.lag),
            byte_size(asked.read_bytes),
            *(f"{value:,}" for value in (asked.requests, asked.retries, asked.refused)),
        )
        rows += (
            f"<tr><td><code>{escape(legible(f'{one.host} {one.process}', 80))}</code></td>"
            f"<td>{escape(legible(one.words or one.state, 200))}</td>"
            + "".join(f'<td class="number">{text}</td>' for text in figures)
            + "</tr>"
        )
    return (
        '<section class="card"><h2>Readers</h2><div class="scroll"><table>'
        f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div></section>"
    )

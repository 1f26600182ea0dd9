"""Incidents: actions that no honest worker takes, by worker, and the workers that are quarantined.
The trainer reports each one here, from its main thread. Each is counted by worker and kind; an
event is recorded when a count doubles, so that a flood does not flood the events, and the list is
part of ``trainer.json``, from which ``deltawire status`` and the trainer's successor read it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from deltawire.display import safe_line
from deltawire.events import Attempt, Event
from deltawire.wire.status import MAX_DETAIL, MAX_INCIDENTS, Incident


class Incidents:
    """Counts incidents and quarantines workers.

    ``record`` takes events. ``known`` are the incidents of an earlier trainer: its quarantine
    stays.

    Example::

        incidents = Incidents(process.events.record, known=status.incidents)
        incidents.report("w3", "not granted", count=40)
        incidents.quarantine("w3", "reward", "group 17: reported 1, recomputed 0")
    """

    def __init__(
        self,
        record: Callable[[Event], None] = lambda _: None,
        *,
        known: Iterable[Incident] = (),
        process: str = "trainer",
    ) -> None:
        self._record = record
        self._process = process
        self._found = {(one.worker, one.kind): one for one in known}
        self.quarantined: dict[str, str] = {
            one.worker: one.detail for one in self._found.values() if one.quarantined
        }
        """Workers whose groups are neither read nor trained on, with the reason."""

    def report(self, worker: str, kind: str, detail: str = "", *, count: int = 1) -> None:
        """Counts an incident; the last detail is kept."""
        self._count(worker, kind, detail, count, quarantined=False)

    def quarantine(self, worker: str, kind: str, detail: str) -> None:
        """Counts an incident and quarantines the worker for the rest of the run."""
        self.quarantined.setdefault(worker, safe_line(detail)[:MAX_DETAIL])
        self._count(worker, kind, detail, 1, quarantined=True)

    def listed(self) -> list[Incident]:
        """The incidents, those of quarantined workers first; at most `MAX_INCIDENTS`."""
        order = sorted(
            self._found.values(), key=lambda one: (not one.quarantined, one.worker, one.kind)
        )
        return order[:MAX_INCIDENTS]

    def _count(self, worker: str, kind: str, detail: str, count: int, *, quarantined: bool) -> None:
        before = self._found.get((worker, kind))
        if before is None and len(self._found) >= 4 * MAX_INCIDENTS and not quarantined:
            return  # Names are cheap: in a flood of them, further ones are not counted.
        total = count + (before.count if before else 0)
        already = before is not None and before.quarantined
        found = Incident(
            worker=worker,
            kind=kind,
            count=total,
            detail=safe_line(detail)[:MAX_DETAIL],
            quarantined=quarantined or already,
        )
        self._found[worker, kind] = found
        doubled = before is None or total.bit_length() > before.count.bit_length()
        if doubled or (quarantined and not already):
            self._record(
                Attempt(
                    process=self._process,
                    at=time.time(),
                    worker=worker,
                    kind=kind,
                    count=total,
                    detail=found.detail,
                    quarantined=found.quarantined,
                )
            )

"""Intake: checks reports about receipts, and stores each of them once."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from blake3 import blake3
from msgspec import Meta

from deltawire.errors import InputError
from deltawire.live.capture.redaction import Redaction
from deltawire.live.capture.spool import Spool
from deltawire.live.feedback.identities import ReportIdentities
from deltawire.live.feedback.limits import FeedbackLimiter, FeedbackRefusal
from deltawire.serving.errors import error_object
from deltawire.wire.captures import KINDS, MAX_EDIT, Feedback, Source, encode_row
from deltawire.wire.objects import prepared
from deltawire.wire.receipts import MAX_RECEIPT_CHARACTERS, Receipt, ReceiptKeys, read_receipt

MAX_BODY_BYTES = 1 << 16
CLOCKS_DIFFER_S = 300.0

_WORDS = {"up": 1.0, "down": -1.0, "yes": 1.0, "no": 0.0}
_RANGES = {
    "accept": (0.0, 1.0),
    "reject": (0.0, 1.0),
    "thumbs": (-1.0, 1.0),
    "score": (-1e6, 1e6),
    "edit_distance": (0.0, 1e6),
    "kept_share": (0.0, 1.0),
    "edit": (0.0, 1.0),
}


class Report(msgspec.Struct, forbid_unknown_fields=True):
    """The body of ``POST /v1/feedback``."""

    receipt: Annotated[str, Meta(max_length=MAX_RECEIPT_CHARACTERS)]
    kind: Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,63}\Z")]
    value: float | bool | str = 1.0
    id: Annotated[str, Meta(max_length=128)] = ""
    at: float | None = None
    note: Annotated[str, Meta(max_length=512)] = ""
    text: Annotated[str, Meta(max_length=MAX_EDIT)] = ""


@dataclass(frozen=True)
class Taken:
    """The answer to a report: an HTTP status, a body, and when to try again (429, 503)."""

    status: int
    body: dict[str, Any]
    after_s: float = 0.0


class UnknownReceiptError(InputError):
    """A receipt that this deployment did not give for this run. The message is the same for all
    reasons, so that a client cannot learn which check failed."""

    def __init__(self) -> None:
        super().__init__(
            "there is no answer with this receipt",
            hint="send the receipt as the gateway gave it, to a gateway of the same deployment",
        )


class FeedbackIntake:
    """Takes reports for the answers of one run.

    Example::

        taken = await intake.take(b'{"receipt": "dw2.…", "kind": "thumbs", "value": "up"}')
    """

    def __init__(
        self,
        spool: Spool,
        identities: ReportIdentities,
        limiter: FeedbackLimiter,
        redaction: Redaction,
        *,
        run: str,
        keys: Callable[[], ReceiptKeys],
        on_stored: Callable[[Feedback], None] = lambda _: None,
    ) -> None:
        self.counts = dict.fromkeys(
            ("stored", "repeated", "conflicting", "unknown", "limited", "invalid", "refused"), 0
        )
        self._spool = spool
        self._identities = identities
        self._limiter = limiter
        self._redaction = redaction
        self._run = run
        self._keys = keys
        self._on_stored = on_stored
        self._under_way: dict[str, asyncio.Future[bool]] = {}

    async def take(
        self, body: bytes, *, users: Collection[str] = (), source: Source = "client"
    ) -> Taken:
        """Stores one report and returns the answer to it. ``users`` are the pseudonyms of the user
        that the request names; the receipt's must be one of them if both have one.

        Raises `InputError` for a report that cannot be parsed and `UnknownReceiptError` for a
        receipt that is not of this deployment and run. An id belongs to its source and its user:
        others may use the same.
        """
        try:
            report = msgspec.json.decode(body, type=prepared(Report))
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            self.counts["invalid"] += 1
            raise InputError(f"the feedback cannot be parsed: {error}"[:300]) from error
        receipt = read_receipt(report.receipt, keys=self._keys(), run=self._run)
        if receipt is None or (users and receipt.user and receipt.user not in users):
            self.counts["unknown"] += 1
            raise UnknownReceiptError
        if report.note:  # A note that cannot be redacted is left out; the report counts without.
            report.note = "".join((await self._redaction.apply([report.note])).texts or ())[:512]
        given = report.text
        if given:  # Tokens are trained on as they were written, or not at all.
            redacted = await self._redaction.apply([given])
            report.text = given if redacted.texts is not None and not redacted.changed else ""
        try:
            _check_text(report.kind, given)
            row = _feedback(report, receipt, source)
        except InputError:
            self.counts["invalid"] += 1
            raise
        return await self._take(row, report)

    async def _take(self, row: Feedback, report: Report) -> Taken:
        content = _content(row, report)
        name = f"{row.source}\0{row.user or row.conversation}\0{row.id}"
        while (running := self._under_way.get(name)) is not None:
            await asyncio.wait([running])
        match self._identities.check(name, content):
            case "same":
                self.counts["repeated"] += 1
                return Taken(200, {"id": row.id})
            case "other":
                self.counts["conflicting"] += 1
                return _refused(409, "this id was used for other feedback", "use a new id")
        if (refusal := self._limiter.take(row.user or row.conversation, row.answer)) is not None:
            self.counts["limited"] += 1
            return _limited(refusal)
        stored: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._under_way[name] = stored
        self._identities.add(name, content)
        self._spool.append(encode_row(_kept(row)), settler(stored))
        return await asyncio.shield(asyncio.ensure_future(self._finish(name, row, stored)))

    async def _finish(self, name: str, row: Feedback, stored: asyncio.Future[bool]) -> Taken:
        try:
            ok = await stored
            if ok:
                self._identities.write(name)
                self.counts["stored"] += 1
                self._on_stored(row)
                return Taken(200, {"id": row.id})
            self._identities.discard(name)
            self.counts["refused"] += 1
        finally:
            self._under_way.pop(name, None)
        return _refused(503, "the gateway cannot store feedback now", "try again later", 10.0)

    def note(self, rows: Iterable[Feedback]) -> None:
        """Stores signals that detectors found; no request waits for them."""
        self._spool.append_all([encode_row(row) for row in rows])


def settler(future: asyncio.Future[bool]) -> Callable[[bool], None]:
    """Returns a callback that sets a future's result unless nothing waits for it any more."""

    def settle(stored: bool) -> None:
        if not future.done():
            future.set_result(stored)

    return settle


def _feedback(report: Report, receipt: Receipt, source: Source) -> Feedback:
    """Returns the row of a report; raises `InputError` for an invalid kind, value or time."""
    now = time.time()
    kind = report.kind
    if kind not in KINDS and not (kind.startswith("event_") and len(kind) > len("event_")):
        raise InputError(
            f"there is no kind of feedback {kind!r}",
            hint=f"use {', '.join(KINDS)}, or event_ and a name",
        )
    at = now if report.at is None else report.at
    if not receipt.at - CLOCKS_DIFFER_S <= at <= now + CLOCKS_DIFFER_S:
        raise InputError(
            "at lies before the answer or in the future", hint="give seconds since 1970"
        )
    value = _value(kind, report.value)
    row = Feedback(
        id=report.id or "auto",
        answer=receipt.answer,
        conversation=receipt.conversation,
        user=receipt.user,
        arm=receipt.arm,
        kind=kind,
        value=value,
        source=source,
        at=at,
        received=now,
        served_at=receipt.at,
        recorded=receipt.recorded,
        note=report.note,
        text=report.text,
    )
    if report.id:
        return row
    name = f"auto-{blake3(_content(row, report)).hexdigest()[:32]}"
    return msgspec.structs.replace(row, id=name)  # Equal reports without an id are one.


def _kept(row: Feedback) -> Feedback:
    """Returns what is stored of a report. Of one about an answer that may not be stored that is
    neither the note, nor the text of an edit, nor the client's id, which may be any text, nor the
    conversation."""
    if row.recorded:
        return row
    name = blake3(f"{row.answer}\0{row.id}".encode()).hexdigest()[:32]
    return msgspec.structs.replace(
        row, id=f"hidden-{name}", conversation=row.answer, note="", text=""
    )


def _content(row: Feedback, report: Report) -> bytes:
    content = [row.answer, row.kind, row.value, report.at, row.note]
    return msgspec.msgpack.encode([*content, row.text] if row.text else content)


def _check_text(kind: str, text: str) -> None:
    """Raises `InputError` for an edit without its text, and for a text of another kind."""
    if kind == "edit" and not text.strip():
        raise InputError("an edit has no text", hint="send the better answer as text")
    if kind != "edit" and text:
        raise InputError(f"feedback of the kind {kind} has no text", hint='send kind "edit"')


def _value(kind: str, given: float | bool | str) -> float:
    value = _WORDS.get(given.lower(), math.nan) if isinstance(given, str) else float(given)
    if kind == "thumbs" and isinstance(given, bool):
        value = 1.0 if given else -1.0
    low, high = _RANGES.get(kind, (-1e6, 1e6))
    if not low <= value <= high:
        raise InputError(f"the value of {kind} must be a number from {low:g} to {high:g}")
    return value


def _refused(status: int, message: str, hint: str, after_s: float = 0.0) -> Taken:
    body = error_object(status, f"{message}; {hint}")
    return Taken(status, body, after_s)


def _limited(refusal: FeedbackRefusal) -> Taken:
    return _refused(429, refusal.reason, "try again later", max(1.0, refusal.after_s))

"""Recorder: turns served answers into receipts and captures, and reports into feedback.

Concurrency::

    event loop                        spool's thread            uploader's thread
      answer ends ─▶ redact ─▶ append ─▶ write, fsync
      receipt goes out ◀─────── stored                 seal ─▶ create segments in the bucket

An answer waits for its receipt at most `STORE_WITHIN_S` after its last token, whatever the disk
does, and never for the bucket or the trainer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from deltawire.config.retention import RetainConfig
from deltawire.errors import DeltawireError
from deltawire.live.capture.consent import ConsentRule
from deltawire.live.capture.names import name_in, normalize_name, storable
from deltawire.live.capture.redaction import Redaction
from deltawire.live.capture.spool import Spool
from deltawire.live.capture.uploader import UPLOAD_EVERY_S, SpooledStream, SpoolUploader
from deltawire.live.compaction.maintenance import (
    MaintenanceThread,
    days_of,
    gateway_compactors,
)
from deltawire.live.deployment_secret import DeploymentSecret
from deltawire.live.feedback.detectors import DetectorRates
from deltawire.live.feedback.identities import ReportIdentities
from deltawire.live.feedback.intake import FeedbackIntake, settler
from deltawire.live.feedback.limits import FeedbackLimiter, FeedbackLimits
from deltawire.live.forgotten import forgotten_users, readmitted_users
from deltawire.live.gateway.answer_rows import (
    ServedRequest,
    capture_row,
    drawn_tokens,
    judged_row,
    receipt_of,
)
from deltawire.live.gateway.conversations import Conversations, LastAnswer
from deltawire.live.gateway.engine_tokens import AnswerReader, ChoiceTokens
from deltawire.live.gateway.judges import Judge, Judges, StoredAnswer
from deltawire.live.gateway.requests import AskedAnswer
from deltawire.live.gateway.user_figures import AnswerSource, UserFigures
from deltawire.private_files import private_folder
from deltawire.store import Bucket
from deltawire.wire import keys
from deltawire.wire.captures import (
    FAILED,
    LEFT,
    NOT_STORED,
    TIMED_OUT,
    WITHHELD,
    Capture,
    Feedback,
    GatewayState,
    ServingReplica,
    ShadowCounts,
    encode_row,
)
from deltawire.wire.decisions import Assignment, assign
from deltawire.wire.objects import encode_json
from deltawire.wire.receipts import (
    MAX_SPANS,
    Receipt,
    hash_tokens,
    read_receipt,
    seal_receipt,
    spans_of,
)
from deltawire.wire.run import Run
from deltawire.wire.user_windows import UserWindow

STORE_WITHIN_S = 2.0
STATE_EVERY_S = 10.0
CONSENT_EVERY_S = 10.0
DEFAULT_SPOOL_BYTES = 1 << 30
MAX_KEPT_CHARACTERS = 4000
_EARLY_ENDS = {FAILED: "failed", LEFT: "left", TIMED_OUT: "timed_out"}
_LOG = logging.getLogger("deltawire.live")


@dataclass(frozen=True, kw_only=True)
class RecorderOptions:
    """The deployment's rules. ``keep_text`` also stores the redacted conversations as text, and
    ``retain`` says for how many days what is stored stays, ``ranges`` are those of feedback."""

    consent: ConsentRule = field(default_factory=ConsentRule)
    keep_text: bool = False
    spool_bytes: int = DEFAULT_SPOOL_BYTES
    limits: FeedbackLimits = field(default_factory=FeedbackLimits)
    retain: RetainConfig = field(default_factory=RetainConfig)
    ranges: Mapping[str, Sequence[float]] = field(default_factory=dict)
    judges: Sequence[Judge] = ()


class Recorder:
    """The receipts, captures and feedback of one gateway.

    ``folder`` is the gateway's state: its name, its spools, the ids of reports. It belongs to one
    process at a time. Pseudonyms and receipts follow from ``secret``, and ``reread`` returns it
    again when the bucket may name another generation; ``reconsent`` returns the consent rule again.

    Example::

        recorder = Recorder(bucket, run, Path("state"), secret, Redaction(None))
        recorder.start(asyncio.get_running_loop())
    """

    def __init__(
        self,
        bucket: Bucket,
        run: Run,
        folder: Path,
        secret: DeploymentSecret,
        redaction: Redaction,
        options: RecorderOptions | None = None,
        *,
        reread: Callable[[], DeploymentSecret] | None = None,
        reconsent: Callable[[], ConsentRule] | None = None,
    ) -> None:
        self.options = options or RecorderOptions()
        self.consent = self.options.consent
        self.consent_fault = ""
        self._reconsent = reconsent
        self._closing = threading.Event()
        self.secret = secret
        self.secret_fault = ""
        self._reread = reread
        self.counts: Counter[str] = Counter()
        self.rates = DetectorRates()
        self.conversations = Conversations()
        self.forgotten: frozenset[str] = frozenset()
        self.readmitted: frozenset[str] = frozenset()
        self.generation: Callable[[], int | None] = lambda: None
        self.assign: Callable[[str, str], Assignment] = serving_only
        self.shadow: Callable[[], ShadowCounts | None] = lambda: None
        self.upstreams: dict[str, str] = {}
        self.replicas: Callable[[], list[ServingReplica]] = list
        self.figures = UserFigures(self.options.ranges)
        self._bucket = bucket
        self._run = run
        self._redaction = redaction
        self._receipt = partial(receipt_of, run.id)
        self._folder = private_folder(folder)
        self.name = name_in(self._folder)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started = time.time()
        self._state_at = float("-inf")
        self._stored_windows: list[UserWindow] = []
        limit = self.options.spool_bytes
        self.captures = self._spool("captures", limit)
        self.feedback = self._spool("feedback", limit)
        self._identities = ReportIdentities(self._folder / "reports")
        self.intake = FeedbackIntake(
            self.feedback,
            self._identities,
            FeedbackLimiter(self.options.limits),
            redaction,
            run=run.id,
            keys=lambda: self.secret.receipt_keys,
            on_stored=self.figures.reported,
        )
        self.judges = Judges(self.options.judges, self.intake.note, self.figures.reported)
        self.uploader = SpoolUploader(
            bucket,
            self.name,
            [
                SpooledStream(self.captures, keys.live_captures, Capture),
                SpooledStream(self.feedback, keys.live_feedback, Feedback),
            ],
            forgotten=self._read_forgotten,
            each_round=self._each_round,
            at_end=self._at_end,
            every_s=UPLOAD_EVERY_S,
        )
        self.maintenance = MaintenanceThread(
            gateway_compactors(bucket, self.name), days_of(self.options.retain)
        )

    @property
    def run_name(self) -> str:
        """The run's name."""
        return self._run.name

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts uploads and maintenance; stored rows are reported to ``loop``."""
        self._loop = loop
        self.figures.start_loading(self._bucket, self.name)  # `_each_round` tries again.
        self.uploader.start()
        self.maintenance.start()
        if self._reconsent is not None:
            threading.Thread(target=self._follow_consent, name="live-consent", daemon=True).start()

    def close(self) -> None:
        """Uploads what can be uploaded and closes the spools; the rest waits on disk."""
        self._closing.set()
        self.maintenance.close()
        self.uploader.close()
        self.captures.close()
        self.feedback.close()
        self._identities.close()

    def warnings(self) -> list[str]:
        """Returns what keeps data from the bucket, in words that name no place."""
        found = []
        if self.uploader.alarm:
            found.append("answers and feedback wait on this machine: the bucket takes none")
        if self.captures.lost or self.feedback.lost:
            found.append("answers or feedback were lost: the spool was full or the disk failed")
        if self.maintenance.alarm:
            found.append("stored segments are not compacted")
        return found

    def totals(self) -> dict[str, float]:
        """Returns the counters by their names."""
        return {
            **self.counts,
            **{f"feedback_{name}": count for name, count in self.intake.counts.items()},
            **{f"judge_{name}": count for name, count in self.judges.counts.items()},
            "captures_lost": self.captures.lost,
            "feedback_lost": self.feedback.lost,
            "redaction_failures": self._redaction.failures,
            "spooled_bytes": self.captures.size + self.feedback.size,
            "uploaded_rows": self.uploader.uploaded,
            "damaged_segments": self.uploader.damaged,
            "compacted_segments": self.maintenance.compacted,
            "expired_rows": self.maintenance.expired,
        }

    def state(self, windows: list[UserWindow] | None = None) -> GatewayState:
        """Returns the gateway's secret by its fingerprints, counters and rates, and figures of
        users: those of now, or the ``windows`` given."""
        return GatewayState(
            gateway=self.name,
            run=self._run.id,
            generations=sorted(self.secret.held),
            started=self._started,
            at=time.time(),
            counts=self.totals(),
            rates=self.rates.listed(),
            shadow=self.shadow(),
            uploaded_until=self.uploader.until,
            upstreams=self.upstreams,
            windows=self.figures.stated() if windows is None else windows,
            replicas=self.replicas(),
        )

    def served(self, asked: AskedAnswer, names: dict[str, str]) -> ServedRequest:
        """Returns what is known of a request before it is answered; ``names`` are ``user``,
        ``conversation``, ``task``, ``cohort`` and ``capture`` as its headers state them, and
        ``client``."""
        secret, readmitted = self.secret, self.readmitted
        name = normalize_name(names["user"]) or normalize_name(asked.user)
        lives = secret.known(name, readmitted)
        named = self.generation()
        number = secret.current_number if named is None or named not in lives else named
        pseudonyms, user = secret.numbered[number].pseudonyms, lives[number][-1]
        text = names["conversation"]
        place = f"named\0{text}" if text else f"opening\0{asked.opening}"
        conversation = affinity = pseudonyms.conversation(user, place)
        if not text and not (asked.chat and user):
            # Users without a name may open alike, and are not one conversation for that.
            conversation = secrets.token_hex(16)
        # A canary assigns by the first pseudonym of its generation, or not at all without it.
        assigned = lives[number][0] if named in (None, number) else ""
        # A user who was forgotten under a pseudonym of any generation is not stored at all.
        known = not any(one[-1] in self.forgotten for one in lives.values())
        return ServedRequest(
            asked,
            conversation,
            user,
            known and self.consent.allows(names["capture"], lives[0][0]),
            self.assign(assigned, conversation),
            storable(names["task"])[:256],
            storable(names["cohort"])[:64],
            names.get("client", ""),
            affinity,
            known,
        )

    def users(self, name: str) -> frozenset[str]:
        """Returns all pseudonyms of the user that a request names."""
        lives = self.secret.known(normalize_name(name), self.readmitted)
        return frozenset(user for one in lives.values() for user in one if user)

    def continued(self, served: ServedRequest) -> None:
        """Stores the signals that this request gives about the conversation's last answer."""
        found = self.conversations.continued(served.conversation, served.asked)
        if found is None or not served.capture:
            return
        last, went = found
        now = time.time()
        self.intake.note(
            Feedback(
                id=f"{name}-{last.receipt.answer}",
                answer=last.receipt.answer,
                conversation=last.receipt.conversation,
                user=last.receipt.user,
                arm=last.receipt.arm,
                kind=f"detected_{name}",
                value=value,
                source="detector",
                at=now,
                received=now,
                served_at=last.receipt.at,
                recorded=last.receipt.recorded,
            )
            for name, value in self.rates.detect(went).items()
        )

    async def finish(
        self,
        served: ServedRequest,
        reader: AnswerReader,
        *,
        version: int | None,
        confirmed: Callable[[], Any],
        first_s: float,
    ) -> list[str]:
        """Returns a receipt for each choice of an answer, after it was stored if it may be.

        ``version`` is the one that the replica held when the answer began, and ``confirmed`` asks
        whether it still does; both count only where the engine states no versions.
        """
        self.counts["answers"] += 1
        first = reader.choices.get(0) or ChoiceTokens()
        ended = first.finish or FAILED, first_s, drawn_tokens(reader, first)
        choices = [reader.choices[index] for index in sorted(reader.choices)]
        if not served.capture or not choices:
            spans = [] if version is None else [(version, 1)]
            found: list[str] = []
            for choice in choices or [ChoiceTokens()]:
                receipt = self._receipt(served, spans, recorded=False)
                if not found:
                    self._figure(served, receipt, *ended)
                self._store_judged(served, receipt, spans, choice.finish or FAILED, first_s)
                found.append(self._seal(receipt))
            return found
        stated = all(len(c.versions) == len(c.ids) for c in reader.choices.values())
        known = stated or (version is not None and await confirmed())
        held = version if known else None
        if len(choices) == 1:
            return [await self._record(served, reader, choices[0], held, first_s, ended)]
        return await asyncio.gather(
            *(
                self._record(served, reader, one, held, first_s, None if place else ended)
                for place, one in enumerate(choices)
            )
        )

    def ended(
        self,
        served: ServedRequest,
        finish: str,
        reason: str,
        first_s: float,
        *,
        late: bool = False,
    ) -> None:
        """Stores that an answer did not come to its end, so that its arm is judged by it: its
        replica failed, its client left, or its outcome was due. ``finish`` is one of `ENDED_EARLY`.
        Nothing waits for the disk: the client may be gone. ``late`` says that it may yet end, and
        has no part in the figures of users before."""
        self.counts[_EARLY_ENDS[finish]] += 1
        early = finish, first_s, None
        if not served.capture:
            receipt = self._receipt(served, [], recorded=False)
            self._store_judged(served, receipt, [], finish, first_s)
            if not late:
                self._figure(served, receipt, *early)
            return
        receipt = self._receipt(served, [], recorded=True)
        if not late:
            self._figure(served, receipt, *early)
        choice, sealed = ChoiceTokens(finish=finish), self._seal(receipt)
        row = capture_row(served, AnswerReader(), choice, receipt, sealed, reason[:256], first_s)

        def count(stored: bool) -> None:
            self._count(stored=stored, blocked=False, fault=row.unusable)

        self.captures.append(encode_row(row), count)

    def _store_judged(
        self,
        served: ServedRequest,
        receipt: Receipt,
        spans: Sequence[tuple[int, int]],
        finish: str,
        first_s: float,
        why: str = NOT_STORED,
    ) -> None:
        """Stores what judges the arm of an answer that may not be stored."""
        if served.judged:
            row = judged_row(served, receipt, spans, finish=finish, first_s=first_s, why=why)
            self.captures.append(encode_row(row))
            self.counts["judged"] += 1

    async def _record(
        self,
        served: ServedRequest,
        reader: AnswerReader,
        choice: ChoiceTokens,
        version: int | None,
        first_s: float,
        ended: tuple[str, float, int | None] | None,
    ) -> str:
        fault, versions = choice.fault(), choice.versions
        if served.upstream:
            fault = "another provider's model drew it"
        if not fault and not reader.prompt:
            fault = "the engine stated no prompt tokens"
        if not fault and len(versions) != len(choice.ids):
            versions = [] if version is None else [version] * len(choice.ids)
            fault = "" if versions else "the weights may have changed while it was drawn"
        spans = [] if fault else spans_of(versions)
        if len(spans) > MAX_SPANS:
            fault, spans = "its weights changed too often", []
        told, asked = choice.texts(), served.asked.texts()
        rendered = [reader.prompt_text] if reader.prompt_text else []
        redacted = await self._redaction.apply([*asked.texts, *told, *rendered])
        opaque = asked.opaque or choice.opaque or not (fault or choice.shows_tokens)
        blocked = redacted.texts is None or (self._redaction.on and opaque)
        if redacted.changed:
            fault = fault or "redacted"
        tokens = "" if fault else hash_tokens(reader.prompt, choice.ids)
        receipt = self._receipt(served, spans, recorded=not blocked, tokens=tokens)
        signed = self._seal(receipt)
        if ended is not None:
            self._figure(served, receipt, *ended)
        stored = False
        if not blocked:
            row = capture_row(served, reader, choice, receipt, signed, fault, first_s)
            if self.options.keep_text:
                kept = {"texts": redacted.texts, "answer": len(asked.texts)}
                row = msgspec.structs.replace(row, text=json.dumps(kept).encode())
            stored = await self._store(encode_row(row))
            if stored and redacted.texts is not None:
                given = redacted.texts[: len(asked.texts)]
                self.judges.offer(StoredAnswer(receipt, given, redacted.texts[len(given)]))
        else:
            drawn = spans or spans_of([] if version is None else [version])
            finish = choice.finish or FAILED
            self._store_judged(served, receipt, drawn, finish, first_s, WITHHELD)
        self._count(stored=stored, blocked=blocked, fault=fault)
        if not stored and receipt.recorded:
            receipt = msgspec.structs.replace(receipt, recorded=False)
            signed = self._seal(receipt)
        self.conversations.remember(
            LastAnswer(
                receipt,
                served.asked.asked[:MAX_KEPT_CHARACTERS],
                told[0][:MAX_KEPT_CHARACTERS],
                first_s,
            )
        )
        return signed

    def _count(self, *, stored: bool, blocked: bool, fault: str) -> None:
        if blocked:
            self.counts["withheld"] += 1
        elif not stored:
            self.counts["unrecorded"] += 1
            if self.counts["unrecorded"] in (1, 10, 100) or self.counts["unrecorded"] % 1000 == 0:
                _LOG.error(
                    "%d answers could not be recorded: the spool is full or the disk fails",
                    self.counts["unrecorded"],
                )
        else:
            self.counts["recorded"] += 1
            self.counts["unusable"] += bool(fault)

    async def _store(self, row: bytes) -> bool:
        stored: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.captures.append(row, settler(stored))
        done, _ = await asyncio.wait([stored], timeout=STORE_WITHIN_S)
        return bool(done) and stored.result()

    def _figure(
        self, served: ServedRequest, receipt: Receipt, finish: str, first_s: float, tokens: Any
    ) -> None:
        version = -1 if served.held is None else served.held
        place = AnswerSource(receipt.arm, version, served.upstream)
        self.figures.answered(
            receipt.answer,
            place,
            finish=finish,
            first_s=first_s,
            tokens=tokens,
            labels=served.labels,
            user=served.user or served.conversation,
        )

    def _seal(self, receipt: Receipt) -> str:
        generation = self.secret.current
        return seal_receipt(receipt, generation.fingerprint, generation.receipt_key)

    def revealed(self, text: str) -> dict[str, Any]:
        """Returns what a receipt of this gateway hides from clients, for holders of the admin
        token: arm, propensity and versions."""
        receipt = read_receipt(text, keys=self.secret.receipt_keys, run=self._run.id)
        if receipt is None:
            return {}
        return {"arm": receipt.arm, "propensity": receipt.propensity, "versions": receipt.spans}

    def _spool(self, name: str, limit: int) -> Spool:
        return Spool(self._folder / name, limit_bytes=limit, call_back=self._call_back)

    def _call_back(self, call: Callable[[], None]) -> object:
        if self._loop is not None:
            return self._loop.call_soon_threadsafe(call)
        call()
        return None

    def _each_round(self) -> None:
        """Reads who was forgotten and the secret, and writes the state now and then; on the
        uploader's thread."""
        now = time.monotonic()
        due = now - self._state_at >= STATE_EVERY_S
        if due:
            self._read_forgotten()
            self._read_secret()
            self.figures.load_from(self._bucket, self.name)
            self._stored_windows = self.figures.stated()
        if due or self.generation() is not None:  # A canary waits for `uploaded_until`.
            state = self.state(self._stored_windows)
            self._bucket.put(keys.live_gateway(self.name), encode_json(state))
        if due:
            self._state_at = now

    def _at_end(self) -> None:
        self.figures.load_from(self._bucket, self.name)
        state = msgspec.structs.replace(self.state(), ended=True)
        self._bucket.put(keys.live_gateway(self.name), encode_json(state))

    def _read_secret(self) -> None:
        """Takes a generation that a rotation has added or put into use. One that cannot be read
        leaves the present ones in use."""
        if self._reread is None:
            return
        try:
            self.secret = self._reread()
        except DeltawireError as error:
            if error.message != self.secret_fault:
                _LOG.error("cannot read the deployment's secret again: %s", error)
            self.secret_fault = error.message
        else:
            self.secret_fault = ""

    def _follow_consent(self) -> None:
        """Reads the consent rule now and then, whether the bucket answers or not."""
        while not self._closing.wait(CONSENT_EVERY_S):
            self._read_consent()

    def _read_consent(self) -> None:
        """Takes the consent rule as it is now. One that cannot be read stores nothing by its list:
        it may have been shortened by users who withdrew."""
        if self._reconsent is None:
            return
        try:
            self.consent = self._reconsent()
        except DeltawireError as error:
            if error.message != self.consent_fault:
                _LOG.error("cannot read who agreed to storing, so nobody counts: %s", error)
            self.consent_fault = error.message
            self.consent = replace(self.consent, users=frozenset())
        else:
            self.consent_fault = ""

    def _read_forgotten(self) -> frozenset[str]:
        self.readmitted = readmitted_users(self._bucket)
        new = forgotten_users(self._bucket) - self.forgotten
        self.forgotten |= new  # A record stays, also if one listing comes back short.
        for user in new:
            self.conversations.forget(user)
        if new:  # Nobody can tell whose rows a damaged segment holds.
            self.captures.remove_damaged()
            self.feedback.remove_damaged()
        return self.forgotten


def serving_only(user: str, conversation: str) -> Assignment:
    """Assigns everybody to the serving arm, and to whichever version a replica holds."""
    del user, conversation
    return assign(None, "")

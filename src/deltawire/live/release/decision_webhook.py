"""Tells another server of each decision, such as a chat or a pager, while a decider runs.

Concurrency::

    decider: `report` each new decision, which never waits ─▶ a queue of `MOST_WAITING`
    one thread: POST, repeated with longer pauses ─▶ the next one

A server that does not answer delays no decision. A decision is told at least once, unless the queue
is full or the decider ends first; its ``id`` says which repeats are the same. Those that other
processes and people made meanwhile are told too.
"""

from __future__ import annotations

import hmac
import http.client
import queue
import sys
import threading
from urllib.parse import urlsplit

import msgspec

from deltawire.display import safe_line
from deltawire.errors import InputError
from deltawire.live.release.bounded_post import post
from deltawire.runtime.decision_log import DecisionLog
from deltawire.wire.decisions import Decision, ServedVersion

SIGNATURE_HEADER = "x-deltawire-signature"
ANSWER_WITHIN_S = 10.0
ATTEMPTS = 6
FIRST_PAUSE_S = 1.0
MOST_WAITING = 256
MOST_ANSWER_BYTES = 64 << 10


class DecisionWebhook:
    """The webhook of one decider. With a ``secret`` the body is signed by HMAC-SHA256, as gateways'
    own webhook takes it.

    Raises `InputError` for an address that is no URL, or holds credentials.

    Example::

        webhook = DecisionWebhook("https://hooks.example.com/live", run="support", secret=b"…")
        webhook.report(decision)
        webhook.close()
    """

    def __init__(self, url: str, *, run: str, secret: bytes = b"") -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError("--webhook is not an http:// or https:// URL")
        if "@" in parts.netloc:
            raise InputError(
                "--webhook holds credentials in its URL", hint="use --webhook-secret-file"
            )
        self._url, self._run, self._secret = url, run, secret
        self._waiting: queue.Queue[bytes | None] = queue.Queue(MOST_WAITING)
        self._seen: int | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._send_all, name="webhook", daemon=True)
        self._thread.start()

    def report(self, decision: Decision) -> None:
        """Tells of a decision later; returns at once. One that finds the queue full is left out."""
        try:
            self._waiting.put_nowait(body_of(decision, self._run))
        except queue.Full:
            _log(f"decision {decision.number} is not told: too many wait for the webhook")

    def report_new(self, log: DecisionLog) -> None:
        """Tells of the decisions that a log has read since the last call; of none that were there
        at the first one."""
        seen, self._seen = self._seen, len(log.decisions)
        for decision in [] if seen is None else log.decisions[seen:]:
            self.report(decision)

    def close(self, timeout_s: float = ANSWER_WITHIN_S) -> None:
        """Sends what waits, for at most so many seconds."""
        self._closing.set()
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _send_all(self) -> None:
        while (body := self._waiting.get()) is not None:
            self._send(body)

    def _send(self, body: bytes) -> None:
        headers = {}
        if self._secret:
            digest = hmac.new(self._secret, body, "sha256").hexdigest()
            headers[SIGNATURE_HEADER] = f"sha256={digest}"
        pause_s, fault = FIRST_PAUSE_S, ""
        for attempt in range(ATTEMPTS):
            try:
                post(
                    self._url,
                    body,
                    timeout_s=ANSWER_WITHIN_S,
                    most_bytes=MOST_ANSWER_BYTES,
                    headers=headers,
                )
                return
            except InputError as error:
                fault = error.message
            except (OSError, http.client.HTTPException, ValueError) as error:
                fault = type(error).__name__
            if attempt < ATTEMPTS - 1 and self._closing.wait(pause_s):
                break
            pause_s *= 2
        _log(f"the webhook was not told of a decision: {fault}")


def body_of(decision: Decision, run: str) -> bytes:
    """Returns what the webhook gets: the decision, an ``id`` for it, and a sentence."""
    served = (decision.serving, decision.candidate, decision.hold_back)
    serving, candidate, held = map(_named, served)
    about = decision.candidate or decision.serving
    return msgspec.json.encode(
        {
            "id": f"{decision.run}-{decision.number}",
            "run": run,
            "number": decision.number,
            "verdict": decision.verdict,
            "text": f"{run}: {decision.verdict}, {about.words}: {decision.reason}"[:1000],
            "serving": serving,
            "candidate": candidate,
            "hold_back": held,
            "share": decision.share,
            "waits_for": decision.waits_for,
            "at": decision.at,
            "by": decision.by,
            "reason": decision.reason,
            "evidence": decision.evidence,
        }
    )


def _named(one: ServedVersion | None) -> dict[str, object] | None:
    if one is None:
        return None
    return {"version": None if one.upstream else one.version, "upstream": one.upstream}


def _log(words: str) -> None:
    print(safe_line(words), file=sys.stderr)  # noqa: T201

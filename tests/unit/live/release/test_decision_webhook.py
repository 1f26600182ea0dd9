"""Decisions are told to a webhook: signed, repeated, bounded, and never in the way."""

import hmac
import http.server
import json
import threading

import pytest
from live_gateway import published

from deltawire.errors import InputError
from deltawire.live.release import decision_webhook
from deltawire.live.release.decision_webhook import SIGNATURE_HEADER, DecisionWebhook
from deltawire.runtime.decision_log import DecisionLog
from deltawire.sync import read_run
from deltawire.wire.decisions import Decision, ServedVersion

SERVED = ServedVersion(0, "0" * 32)


def decision(number, verdict="serve", **more):
    return Decision(
        number=number, run="0" * 32, verdict=verdict, serving=SERVED, at=1.0, by="ann", **more
    )


class Hook(http.server.BaseHTTPRequestHandler):
    """Answers by the next of ``statuses``, 200 after the last."""

    def do_POST(self):
        server = self.server
        body = self.rfile.read(int(self.headers["Content-Length"]))
        server.seen.append((body, self.headers.get(SIGNATURE_HEADER)))
        status = server.statuses.pop(0) if server.statuses else 200
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "http://127.0.0.1:9/elsewhere")
        self.end_headers()
        if status == 200:
            self.wfile.write(b"x" * server.answer_bytes)

    def log_message(self, *args):
        """Says nothing."""


@pytest.fixture
def hook(monkeypatch):
    monkeypatch.setattr(decision_webhook, "FIRST_PAUSE_S", 0.001)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hook)
    server.seen, server.statuses, server.answer_bytes = [], [], 2
    server.url = f"http://127.0.0.1:{server.server_port}/live"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_decision_is_signed_and_repeated_until_it_is_taken(hook, capsys):
    hook.statuses = [500, 302]
    webhook = DecisionWebhook(hook.url, run="support", secret=b"key")
    candidate = ServedVersion.of_upstream("openai")
    webhook.report(decision(3, "rollback", candidate=candidate, reason="worse: thumbs"))
    while len(hook.seen) < 3:
        webhook._thread.join(0.01)
    webhook.close()
    bodies = {body for body, _ in hook.seen}
    assert len(hook.seen) == 3, "a redirect is not followed, and counts as refused"
    (body,) = bodies
    assert hook.seen[0][1] == "sha256=" + hmac.new(b"key", body, "sha256").hexdigest()
    told = json.loads(body)
    assert told["id"] == f"{'0' * 32}-3"
    assert told["text"] == "support: rollback, upstream openai: worse: thumbs"
    assert told["candidate"] == {"version": None, "upstream": "openai"}
    assert capsys.readouterr().err == ""


def test_a_server_that_refuses_or_floods_delays_nothing_and_is_named(hook, capsys, monkeypatch):
    monkeypatch.setattr(decision_webhook, "ATTEMPTS", 2)
    monkeypatch.setattr(decision_webhook, "MOST_WAITING", 2)
    hook.answer_bytes = 1 << 17
    webhook = DecisionWebhook(hook.url, run="support")
    for number in range(200):
        webhook.report(decision(number))
    said = capsys.readouterr().err
    assert "is not told: too many wait" in said
    while "answered more than 64 KiB" not in said:
        webhook._thread.join(0.01)
        said += capsys.readouterr().err
    webhook.close()


def test_decisions_of_people_are_told_and_old_ones_are_not(hook):
    bucket = published()
    log = DecisionLog(bucket, read_run(bucket).id)
    first = Decision(number=0, run=log.run, verdict="serve", serving=SERVED, at=1.0, by="ann")
    assert log.append(first)
    webhook = DecisionWebhook(hook.url, run="support")
    webhook.report_new(log)
    other = DecisionLog(bucket, log.run)
    other.poll()
    person = Decision(
        number=1, run=log.run, verdict="gate", serving=SERVED,
        candidate=ServedVersion(1, "1" * 32), at=2.0, by="bob",
    )  # fmt: skip
    assert other.append(person)
    log.poll()
    webhook.report_new(log)
    webhook.report_new(log)
    webhook.close()
    assert [json.loads(body)["by"] for body, _ in hook.seen] == ["bob"]


@pytest.mark.parametrize("url", ["ftp://x", "x", "https://", "https://user:pw@x/hook"])
def test_an_address_that_cannot_be_is_refused(url):
    with pytest.raises(InputError, match="--webhook") as error:
        DecisionWebhook(url, run="support")
    assert "pw" not in str(error.value)

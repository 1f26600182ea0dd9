"""The client repeats what got no answer, under one id, and passes refusals on."""

import asyncio
import http.server
import json
import threading
from types import SimpleNamespace

import pytest

from deltawire.errors import InputError, RetryError
from deltawire.live.feedback import client
from deltawire.live.feedback.client import AsyncFeedbackClient, FeedbackClient, receipt_of


class Scripted(http.server.BaseHTTPRequestHandler):
    """Answers each report by the next of ``answers``: a status and a body, or None to hang up."""

    answers, bodies = [], []

    def do_POST(self):
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        found = self.answers.pop(0)
        if found is None:
            self.close_connection = True
            return
        status, data = found
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        """Says nothing."""


@pytest.fixture
def gateway(monkeypatch):
    pauses = []
    monkeypatch.setattr(client, "time", SimpleNamespace(sleep=pauses.append))
    Scripted.answers, Scripted.bodies = [], []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", pauses
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_report_without_an_answer_is_repeated_with_the_same_id(gateway):
    url, pauses = gateway
    Scripted.answers += [None, (503, b"busy"), (429, b'{"error": {"message": "slow"}}')]
    Scripted.answers.append((200, b'{"id": "given"}'))
    assert FeedbackClient(url, "token").send("dw1.x", "accept", at=5.0) == "given"
    assert len({body["id"] for body in Scripted.bodies}) == 1
    assert Scripted.bodies[0]["id"].startswith("py-")
    assert {body["at"] for body in Scripted.bodies} == {5.0}
    assert pauses == [0.2, 0.4, 0.8]


def test_the_last_failure_is_raised_with_its_reason(gateway):
    url, _ = gateway
    Scripted.answers += [None, (503, b'{"error": {"message": "the disk is full"}}')]
    with pytest.raises(RetryError, match="answers 503: the disk is full"):
        FeedbackClient(url, "token", attempts=2).send("dw1.x", "accept")
    Scripted.answers.append((200, b"[]"))
    with pytest.raises(RetryError, match="does not answer"):
        FeedbackClient(url, "token", attempts=1).send("dw1.x", "accept")
    with pytest.raises(RetryError, match="was not asked"):
        FeedbackClient(url, "token", attempts=0).send("dw1.x", "accept")


def test_a_refusal_is_not_repeated(gateway):
    url, pauses = gateway
    Scripted.answers.append((409, b"<html>"))
    with pytest.raises(InputError, match=r"refuses the feedback \(409\): no reason given"):
        FeedbackClient(url, "token").send("dw1.x", "accept", id="one")
    assert not pauses
    with pytest.raises(InputError, match="not an http"):
        FeedbackClient("ftp://gateway", "token")


def test_answers_without_a_receipt_have_an_empty_one():
    assert receipt_of({"deltawire": {"receipt": "dw1.x"}}) == "dw1.x"
    assert [receipt_of(one) for one in ({}, {"deltawire": 1}, {"deltawire": {"receipt": 1}})] == [
        "", "", "",
    ]  # fmt: skip


def test_a_program_on_an_event_loop_is_not_held_up_while_a_report_is_repeated(gateway):
    url, pauses = gateway
    Scripted.answers = [(503, b"{}"), (200, b'{"id": "x"}')]

    async def scenario():
        sending = asyncio.create_task(AsyncFeedbackClient(url, "t").send("r", "thumbs", "up"))
        await asyncio.sleep(0)
        assert not sending.done()
        return await sending

    assert asyncio.run(scenario()) == "x"
    first, second = Scripted.bodies
    assert first == second
    assert len(pauses) == 1

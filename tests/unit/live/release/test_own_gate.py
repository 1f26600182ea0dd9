"""A gate's command or URL is believed only if all of its output is scores."""

import http.server
import json
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import pytest

from deltawire.errors import InputError
from deltawire.live.release import own_gate
from deltawire.live.release.own_gate import FIRST_PAUSE_S, OwnGate, measure_by, parse_scores
from deltawire.wire.decisions import ServedVersion

SERVING, CANDIDATE = ServedVersion(0, "0" * 32), ServedVersion(1, "1" * 32)


def python(code, **options):
    return measure_by(f"{sys.executable} -c '{code}'", "file:///run", timeout_s=20.0, **options)


def lines(*items):
    return b"".join(json.dumps({"id": i, "score": s}).encode() + b"\n" for i, s in items)


def test_one_line_for_each_item():
    assert parse_scores(lines(("a", 0.5), (7, 1)) + b"\n  \n") == {"a": 0.5, "7": 1.0}


@pytest.mark.parametrize(
    ("output", "named"),
    [
        (b'{"id": "a", "score": NaN}\n', "line 1"),
        (b'{"id": "a", "score": 1e999}\n', "line 1"),
        (lines(("a", 0.5), ("b", 1.01)), "line 2"),
        (lines(("a", -0.1)), "line 1"),
        (b'{"id": "a", "score": true}\n', "line 1"),
        (b'{"id": "a", "score": null}\n', "line 1"),
        (b'{"id": "", "score": 1}\n', "line 1"),
        (b'{"id": "a"}\n', "line 1"),
        (b'{"score": 1}\n', "line 1"),
        (b"loading the model\n" + lines(("a", 1.0), ("b", 1.0)), "line 1"),
        (b"[" * 100_000, "line 1"),
        (b'\xff{"id": "a", "score": 1}\n', "line 1"),
        (lines(("a", 0.5), ("a", 1.0)), "twice"),
        (lines((1, 0.5), ("1", 1.0)), "twice"),
        (lines(("a", 1.0)), "at least"),
        (b"", "at least"),
    ],
)
def test_anything_else_is_refused(output, named):
    with pytest.raises(InputError, match=named):
        parse_scores(output)


def test_too_many_items_are_refused(monkeypatch):
    monkeypatch.setattr(own_gate, "MAX_ITEMS", 10)
    with pytest.raises(InputError, match="more than 10 items"):
        parse_scores(lines(*((n, 1.0) for n in range(11))))


def test_a_flood_is_cut_off_and_its_command_killed(monkeypatch):
    monkeypatch.setattr(own_gate, "MAX_BYTES", 1 << 20)
    began = time.monotonic()
    with pytest.raises(InputError, match="printed more"):
        python("while True: print(chr(120) * 4096)")(CANDIDATE)
    assert time.monotonic() - began < 15


def test_a_command_that_hangs_is_killed_with_what_it_started(tmp_path):
    pid = tmp_path / "pid"
    script = tmp_path / "hang.sh"
    script.write_text(f"sleep 300 & echo $! > {pid}.new; mv {pid}.new {pid}; wait\n")
    stop_once_written(pid, stopping := threading.Event())
    measure = measure_by(f"/bin/sh {script}", "file:///run", timeout_s=120.0, stopping=stopping)
    with pytest.raises(InputError, match="in time"):
        measure(CANDIDATE)
    child = int(pid.read_text())
    for _ in range(100):
        try:
            os.kill(child, 0)
            state = Path(f"/proc/{child}/stat").read_text().split()[2]
        except (ProcessLookupError, FileNotFoundError):
            return
        if state == "Z":
            return
        time.sleep(0.05)
    pytest.fail("the command's child still runs")


def stop_once_written(path, stopping):
    """Sets ``stopping`` once a command has written a file."""

    def wait():
        while not path.exists() and not stopping.wait(0.02):
            pass
        stopping.set()

    threading.Thread(target=wait, daemon=True).start()


def test_a_command_that_closes_its_output_and_stays_is_killed_when_it_is_stopped(tmp_path):
    closed, stopping = tmp_path / "closed", threading.Event()
    script = tmp_path / "stay.sh"
    script.write_text(f"exec 1>&- 2>&-; touch {closed}; sleep 300\n")
    stop_once_written(closed, stopping)
    measure = measure_by(f"/bin/sh {script}", "file:///run", timeout_s=240.0, stopping=stopping)
    began = time.monotonic()
    # It may be stopped before its closed output is seen.
    with pytest.raises(InputError, match=r"did not end (within|in time)"):
        measure(CANDIDATE)
    assert time.monotonic() - began < 120


def test_a_command_that_takes_too_long_is_killed(tmp_path):
    script = tmp_path / "stay.sh"
    for text in ("exec 1>&- 2>&-; sleep 300\n", "sleep 300\n"):
        script.write_text(text)
        with pytest.raises(InputError, match="did not end"):
            measure_by(f"/bin/sh {script}", "file:///run", timeout_s=0.2)(CANDIDATE)


def test_whole_scores_do_not_count_if_the_command_fails():
    code = 'print("{\\"id\\": 1, \\"score\\": 1}\\n{\\"id\\": 2, \\"score\\": 1}"); exit("no GPU")'
    with pytest.raises(InputError, match="status 1: no GPU"):
        python(code)(CANDIDATE)


def test_a_command_that_is_not_there_is_named():
    with pytest.raises(InputError, match="does not start"):
        measure_by("/no/such/command", "r", timeout_s=1.0)(CANDIDATE)
    for gate in ("", "   ", "'open", "http://user:secret@host/"):
        with pytest.raises(InputError):
            measure_by(gate, "r", timeout_s=1.0)


def measured(scores, clock=time.monotonic):
    """A gate whose measurements return these, in order, or raise them."""
    left = list(scores)
    asked = []

    def measure(version):
        asked.append(version.version)
        found = left.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    return OwnGate(measure, clock=clock), asked


def poll(gate, serving=SERVING, candidate=CANDIDATE):
    gate.poll(serving, candidate)
    gate.wait()


def test_a_version_gains_nothing_by_leaving_out_items():
    now = [0.0]
    whole = {"a": 1.0, "b": 0.0, "c": 0.0}
    gate, asked = measured([whole, {"a": 1.0, "c": 1.0}, whole], clock=lambda: now[0])
    poll(gate)
    poll(gate)
    assert "1 items are missing and 0 are new" in gate.alarm
    assert list(gate.scores()) == [0]
    poll(gate)
    assert asked == [0, 1], "it is not asked again at once"
    now[0] = FIRST_PAUSE_S + 1
    poll(gate)
    assert gate.alarm == ""
    assert gate.scores()[1]["items"].correct == (1.0, 0.0, 0.0)


def test_a_version_that_comes_to_serve_is_measured_again():
    """By the result that let it pass, it would look better than it is."""
    gate, asked = measured([{"a": 0.0, "b": 0.0}, {"a": 1.0, "b": 1.0}, {"a": 0.0, "b": 1.0}])
    for _ in range(3):
        poll(gate)
    assert asked == [0, 1]
    poll(gate, CANDIDATE, ServedVersion(2, "2" * 32))
    assert asked == [0, 1, 1]
    score = gate.scores()[1]["items"]
    assert (score.correct, score.again) == ((1.0, 1.0), (0.0, 1.0))


def test_versions_that_are_not_compared_any_more_are_forgotten():
    scores = {"a": 0.0, "b": 1.0}
    gate, asked = measured([scores] * 30)
    for number in range(10):
        for _ in range(3):
            poll(gate, ServedVersion(number, "0" * 32), ServedVersion(number + 1, "0" * 32))
        assert set(gate.scores()) == {number, number + 1}
    assert len(asked) == 20


def test_pauses_after_failures_grow():
    now = [0.0]
    gate, asked = measured([InputError("no")] * 9, clock=lambda: now[0])
    for _ in range(10 * 60):
        poll(gate)
        now[0] += 1.0
    assert len(asked) == 4


class Answers(http.server.BaseHTTPRequestHandler):
    """Says what the test wants, and notes what it was asked."""

    said = b""
    announced = None
    status = 200
    asked: ClassVar[list] = []

    def do_POST(self):
        self.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(self.status)
        if self.status == 307:
            self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", str(self.announced or len(self.said)))
        self.end_headers()
        self.wfile.write(self.said)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    class Mine(Answers):
        asked: ClassVar[list] = []

    one = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Mine)
    thread = threading.Thread(target=one.serve_forever, daemon=True)
    thread.start()
    yield Mine, measure_by(f"http://127.0.0.1:{one.server_port}/", "s3://b/run", timeout_s=10.0)
    one.shutdown()
    one.server_close()
    thread.join()


@pytest.mark.parametrize("slow", ["headers", "body"])
def test_a_url_that_answers_byte_by_byte_is_cut_off(slow):
    """Each byte came within the time that a read may take."""
    ended = threading.Event()

    def trickle(listener):
        at, _ = listener.accept()
        with at, suppress(OSError):
            if slow == "body":
                at.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
            else:
                at.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
            while not ended.wait(0.05):
                at.sendall(b" ")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=trickle, args=[listener], daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        stop = threading.Timer(60.0, ended.set)
        stop.start()
        with pytest.raises(InputError, match="did not end within"):
            measure_by(url, "s3://b/run", timeout_s=0.5)(CANDIDATE)
        assert not ended.is_set(), "it waited for the server"
        stop.cancel()
        ended.set()
        thread.join(30)


def test_a_url_is_asked_for_a_version(server):
    answers, measure = server
    answers.said = lines(("a", 0.25), ("b", 1.0))
    assert measure(CANDIDATE) == {"a": 0.25, "b": 1.0}
    assert answers.asked == [{"run": "s3://b/run", "version": 1, "digest": "1" * 32}]


@pytest.mark.parametrize(
    ("status", "announced", "named"),
    [(500, None, "status 500"), (307, None, "status 307"), (200, 999, "")],
)
def test_a_url_that_fails_or_is_cut_short_measures_nothing(server, status, announced, named):
    answers, measure = server
    answers.status, answers.announced, answers.said = status, announced, lines(("a", 1), ("b", 1))
    gate = OwnGate(measure)
    poll(gate)
    assert gate.scores() == {}
    assert gate.alarm
    assert named in gate.alarm

"""A program that ends without closing its publisher loses no version, or says which."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import program_to_end
import pytest

import deltawire
from deltawire.errors import InputError
from deltawire.store import open_bucket
from deltawire.sync import load_mirror, newest_version, read_run

WAYS = {
    "return": 0,
    "exit": 3,
    "error": 1,
    "interrupted": -signal.SIGINT,
    "terminated": -signal.SIGTERM,
    "fork": 0,
}
OF_SLIME = ("return", "error", "interrupted", "terminated")
AWAY = "away, interrupted"
LOST = {"_exit": 4, "own handler": 5}


class Programs:
    """Programs that run at the same time, each on a run of its own."""

    def __init__(self, folder):
        command = [sys.executable, program_to_end.__file__]
        self.server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._folder, self.pids = folder, {}

    def url(self, way):
        return str(self._folder / way.replace(", ", "-"))

    def _ask(self, *words):
        self.server.stdin.write(json.dumps(words) + "\n")
        self.server.stdin.flush()
        return int(self.server.stdout.readline())

    def start(self, way):
        self.pids[way] = self._ask("start", self.url(way), way)

    def said(self, way):
        return Path(f"{self.url(way)}.said").read_text()

    def end(self, way):
        """Waits for the program's end; returns its status and what it wrote to stderr."""
        if way not in self.pids:
            self.start(way)
        return self._ask("wait", self.pids[way]), self.said(way)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    found = Programs(tmp_path_factory.mktemp("programs"))
    for way in [*WAYS, *LOST, "two", "daemon", AWAY, *(f"slime, {way}" for way in OF_SLIME)]:
        found.start(way)
    yield found
    with found.server:  # Ends when its stdin does.
        found.server.stdin.close()


def newest_value(url):
    bucket = open_bucket(url)
    mirror = load_mirror(bucket, read_run(bucket), at=newest_version(bucket))
    return mirror.version, mirror.tensors["w"].view(np.float32)[0]


@pytest.mark.parametrize("way", WAYS)
def test_the_last_version_is_committed_however_the_program_ends(programs, way):
    found, said = programs.end(way)
    assert found == WAYS[way], said
    assert newest_value(programs.url(way)) == (2, 2.0)
    assert "deltawire:" not in said
    assert ("Traceback" in said) == (way in ("error", "interrupted"))


@pytest.mark.parametrize("way", OF_SLIME)
def test_what_slime_left_while_the_store_was_away_is_committed_at_the_end(programs, way):
    found, said = programs.end(f"slime, {way}")
    assert found == WAYS[way], said
    assert newest_value(programs.url(f"slime, {way}")) == (2, 2.0)
    assert "was not committed" not in said
    assert ("Traceback" in said) == (way in ("error", "interrupted"))


def test_versions_of_two_publishers_are_committed(programs):
    assert programs.end("two") == (0, "")
    assert newest_value(programs.url("two")) == (2, 2.0)
    assert newest_value(f"{programs.url('two')}-2") == (1, 1.0)


def test_a_thread_that_still_publishes_at_the_end_loses_nothing_that_it_was_told(programs):
    status, said = programs.end("daemon")
    assert status == 0, said
    version, value = newest_value(programs.url("daemon"))
    assert version == value >= 2


@pytest.mark.parametrize("way", LOST)
def test_the_next_start_names_the_version_that_was_lost(programs, caplog, way):
    url = programs.url(way)
    assert programs.end(way)[0] == LOST[way]
    assert newest_value(url) == (1, 1.0)
    weights = program_to_end.weights(3)
    with caplog.at_level(logging.WARNING), deltawire.open_publisher(url, weights) as publisher:
        assert "version 2 (global_step 20)" in caplog.text
        assert "was not committed" in caplog.text
        assert publisher.publish(weights, wait=True) == publisher.version == 2
    caplog.clear()
    with deltawire.open_publisher(url, weights):
        assert caplog.text == ""


def test_a_second_interrupt_ends_the_wait_and_names_the_version(programs):
    way = AWAY
    process = programs.pids[way]
    deadline = time.monotonic() + 60
    while "before the process ends" not in programs.said(way):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(process, signal.SIGINT)
    _, said = programs.end(way)
    url = programs.url(way)
    assert f"version 2 of file://{url} was not committed: interrupted" in said
    assert newest_value(url) == (1, 1.0)


@pytest.mark.drills
@pytest.mark.long
def test_a_store_that_stays_away_ends_the_wait_and_the_version_is_named(programs):
    status, said = programs.end("away")
    assert status == 1
    assert "the program's own" in said
    assert "version 2" in said
    assert "was not committed: the store has not answered" in said


@pytest.mark.drills
@pytest.mark.long
def test_a_store_that_hangs_does_not_keep_a_process_that_is_terminated(programs):
    status, said = programs.end("hangs, terminated")
    assert status == -signal.SIGTERM
    assert "version 2" in said
    assert "was not committed: not within" in said


def test_a_publisher_is_a_context_that_keeps_the_error_of_its_body(tmp_path):
    url = str(tmp_path / "run")

    def fails():
        with deltawire.open_publisher(url, program_to_end.weights(0)) as publisher:
            publisher.publish(program_to_end.weights(1))
            raise KeyError("own")

    with pytest.raises(KeyError, match="own"):
        fails()
    assert newest_value(url) == (1, 1.0)


def test_a_forked_child_cannot_publish(tmp_path, monkeypatch):
    with deltawire.open_publisher(str(tmp_path / "run"), program_to_end.weights(0)) as publisher:
        with monkeypatch.context() as changed:
            changed.setattr("os.getpid", lambda: 1)
            with pytest.raises(InputError, match="forked from"):
                publisher.publish(program_to_end.weights(1))
            publisher.close()
        assert publisher.publish(program_to_end.weights(1), wait=True) == 1


def test_sigterm_is_left_to_the_system_again(tmp_path):
    """In an interpreter of its own: another test's publisher may be open in this one."""
    program = """
import signal, sys
import numpy as np
import deltawire

before = signal.getsignal(signal.SIGTERM)
with deltawire.open_publisher(sys.argv[1], {"w": np.zeros(4, np.float32)}):
    assert signal.getsignal(signal.SIGTERM) is not before
assert signal.getsignal(signal.SIGTERM) is before
"""
    command = [sys.executable, "-c", program, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr

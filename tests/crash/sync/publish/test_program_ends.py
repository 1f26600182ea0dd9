"""A program that ends without closing its publisher loses no version, or says which."""

import logging
import signal
import subprocess
import sys

import numpy as np
import program_to_end
import pytest

import deltawire
from deltawire.errors import InputError
from deltawire.store import open_bucket
from deltawire.sync import load_mirror, newest_version, read_run

PROGRAM = program_to_end.__file__


def start(url, way):
    command = [sys.executable, PROGRAM, url, way]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def end(url, way):
    """Runs the program to its end; returns its status and what it wrote to stderr."""
    process = start(url, way)
    _, said = process.communicate(timeout=120)
    return process.returncode, said


def newest_value(url):
    bucket = open_bucket(url)
    mirror = load_mirror(bucket, read_run(bucket), at=newest_version(bucket))
    return mirror.version, mirror.tensors["w"].view(np.float32)[0]


@pytest.mark.parametrize(
    ("way", "status"),
    [
        ("return", 0),
        ("exit", 3),
        ("error", 1),
        ("interrupted", -signal.SIGINT),
        ("terminated", -signal.SIGTERM),
        ("fork", 0),
    ],
)
def test_the_last_version_is_committed_however_the_program_ends(tmp_path, way, status):
    url = str(tmp_path / "run")
    found, said = end(url, way)
    assert found == status, said
    assert newest_value(url) == (2, 2.0)
    assert "deltawire:" not in said
    assert ("Traceback" in said) == (way in ("error", "interrupted"))


def test_versions_of_two_publishers_are_committed(tmp_path):
    url = str(tmp_path / "run")
    assert end(url, "two") == (0, "")
    assert newest_value(url) == (2, 2.0)
    assert newest_value(f"{url}-2") == (1, 1.0)


def test_a_thread_that_still_publishes_at_the_end_loses_nothing_that_it_was_told(tmp_path):
    url = str(tmp_path / "run")
    status, said = end(url, "daemon")
    assert status == 0, said
    version, value = newest_value(url)
    assert version == value >= 2


@pytest.mark.parametrize(("way", "status"), [("_exit", 4), ("own handler", 5)])
def test_the_next_start_names_the_version_that_was_lost(tmp_path, caplog, way, status):
    url = str(tmp_path / "run")
    assert end(url, way)[0] == status
    assert newest_value(url) == (1, 1.0)
    weights = program_to_end.weights(3)
    with caplog.at_level(logging.WARNING), deltawire.open_publisher(url, weights) as publisher:
        assert "version 2 (global_step 20)" in caplog.text
        assert "was not committed" in caplog.text
        assert publisher.publish(weights, wait=True) == publisher.version == 2
    caplog.clear()
    with deltawire.open_publisher(url, weights):
        assert caplog.text == ""


def test_a_second_interrupt_ends_the_wait_and_names_the_version(tmp_path):
    url = str(tmp_path / "run")
    process = start(url, "away, interrupted")
    for line in process.stderr:
        if "before the process ends" in line:
            process.send_signal(signal.SIGINT)
            break
    _, said = process.communicate(timeout=120)
    assert f"version 2 of file://{tmp_path}/run was not committed: interrupted" in said
    assert newest_value(url) == (1, 1.0)


@pytest.mark.drills
@pytest.mark.long
def test_a_store_that_stays_away_ends_the_wait_and_the_version_is_named(tmp_path):
    status, said = end(str(tmp_path / "run"), "away")
    assert status == 1
    assert "the program's own" in said
    assert "version 2" in said
    assert "was not committed: the store has not answered" in said


@pytest.mark.drills
@pytest.mark.long
def test_a_store_that_hangs_does_not_keep_a_process_that_is_terminated(tmp_path):
    status, said = end(str(tmp_path / "run"), "hangs, terminated")
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
    before = signal.getsignal(signal.SIGTERM)
    with deltawire.open_publisher(str(tmp_path / "run"), program_to_end.weights(0)):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before

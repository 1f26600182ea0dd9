"""Compaction stops before the interpreter ends: native code would end the process by SIGABRT."""

import subprocess
import sys
import threading

import numpy as np

import deltawire
from deltawire.store import open_bucket
from deltawire.sync.publish import compaction

TENSORS = {name: np.zeros(1 << 10, np.float32) for name in "abc"}

PROGRAM = """
import sys, threading
import numpy as np
import deltawire
from deltawire import codec
from deltawire.sync.publish import compaction

entered, encode = threading.Event(), compaction.encode_chunk
zeros, ones = np.zeros(1 << 16, np.uint32), np.ones(1 << 16, np.uint32)

def busy(*arguments):
    entered.set()
    while not publisher.compaction._compactor.stopped.is_set():
        codec.encode(zeros, ones, dtype="F32")
    return encode(*arguments)

compaction.encode_chunk = busy
tensors = {"a": np.zeros(1 << 10, np.float32)}
publisher = deltawire.open_publisher(sys.argv[1], tensors)
for number in range(1, 5):
    tensors["a"] = np.full(1 << 10, number, np.float32)
    publisher.publish(tensors, wait=True)
assert entered.wait(120)
sys.exit(3)
"""


def test_a_program_that_ends_during_compaction_keeps_its_status(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "run")],
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (3, "")


def test_no_further_chunk_is_compacted(tmp_path, monkeypatch):
    entered, leave, encode = threading.Event(), threading.Event(), compaction.encode_chunk
    calls = []

    def waiting(run, chunk, *rest):
        calls.append(chunk.name)
        entered.set()
        assert leave.wait(120)
        return encode(run, chunk, *rest)

    monkeypatch.setattr(compaction, "encode_chunk", waiting)
    bucket = open_bucket(str(tmp_path / "run"), create=True)
    with deltawire.open_publisher(bucket.url, TENSORS) as publisher:
        for number in range(1, 5):
            changed = {name: np.full(1 << 10, number, np.float32) for name in TENSORS}
            publisher.publish(changed, wait=True)
        assert entered.wait(120)
        publisher.compaction.stop(0.0)
        leave.set()
        publisher.compaction.stop(120.0)
        assert len(calls) == 1
        assert publisher.compaction.made == []

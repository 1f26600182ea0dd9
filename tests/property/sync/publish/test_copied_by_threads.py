"""Copies with several threads are exact; after an interrupt no thread writes."""

import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire.sync.publish import parallel_copy as copying
from deltawire.sync.publish.parallel_copy import Copier


@given(
    st.lists(st.integers(0, 5000), max_size=8),
    st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64]),
    st.integers(1, 5),
    st.integers(8, 4096),
    st.integers(0, 1 << 30),
)
@settings(max_examples=60, deadline=None)
def test_any_sizes_with_any_number_of_threads(sizes, dtype, threads, part, seed):
    rng = np.random.default_rng(seed)
    sources = [np.frombuffer(rng.bytes(n * np.dtype(dtype).itemsize), dtype) for n in sizes]
    targets = [np.zeros_like(source) for source in sources]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "PART_BYTES", part)
        patch.setattr(copying, "_SINGLE_BYTES", 64)
        copier = Copier(threads)
        copier.copy(zip(targets, sources, strict=True))
        copier.close()
    for target, source in zip(targets, sources, strict=True):
        assert np.array_equal(target, source)


def test_errors_in_a_thread_are_raised(monkeypatch):
    monkeypatch.setattr(copying, "_SINGLE_BYTES", 0)
    copier = Copier(2)
    with pytest.raises(ValueError, match="broadcast"):
        copier.copy([(np.zeros(4, np.uint8), np.zeros(5, np.uint8))])
    copier.close()


def test_no_thread_writes_after_an_interrupt(monkeypatch):
    monkeypatch.setattr(copying, "_SINGLE_BYTES", 0)
    monkeypatch.setattr(copying, "PART_BYTES", 1)
    busy, begun = threading.Semaphore(0), []
    plain = np.copyto

    def slow(target, source):
        begun.append(1)
        busy.release()
        time.sleep(0.05)
        plain(target, source)

    monkeypatch.setattr(copying.np, "copyto", slow)
    target, source = np.zeros(50, np.uint8), np.ones(50, np.uint8)

    def pairs():
        yield target, source
        busy.acquire()
        raise KeyboardInterrupt

    copier = Copier(2)
    with pytest.raises(KeyboardInterrupt):
        copier.copy(pairs())
    there = target.copy()
    time.sleep(0.2)
    assert np.array_equal(target, there)
    assert len(begun) == int(there.sum())
    copier.close()

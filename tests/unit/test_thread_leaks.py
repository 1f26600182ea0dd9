"""A test that leaves a thread running fails: nothing of it may run into a later test."""

import threading
from concurrent.futures import ThreadPoolExecutor

import thread_leaks


def test_a_thread_that_was_left_is_named():
    before = thread_leaks.threads()
    closed = threading.Event()
    thread = threading.Thread(target=closed.wait, name="poller", daemon=True)
    thread.start()
    try:
        (left,) = thread_leaks.leaked(before, grace_s=0.1)
        assert left is thread
        assert thread_leaks.describe(left) == "poller (threading.Event.wait)"
    finally:
        closed.set()
        thread.join()
    assert thread_leaks.leaked(before) == []


def test_an_executor_that_nothing_holds_is_no_leak():
    before = thread_leaks.threads()
    ThreadPoolExecutor(1).submit(int).result()
    assert thread_leaks.leaked(before) == []


def test_every_test_is_checked(request):
    assert {"_test_ends_its_threads", "_module_ends_its_threads"} <= set(request.fixturenames)

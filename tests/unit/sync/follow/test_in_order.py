"""Work on many pieces, in threads, in the order of the pieces."""

import threading

from deltawire.store.worker_threads import WorkerThreads
from deltawire.sync.follow.fetch import in_order


def threads_that_work(items):
    with WorkerThreads(2) as pool:
        return list(in_order(pool, lambda item: (item, threading.current_thread()), items, ahead=2))


def test_a_single_item_starts_no_thread():
    assert threads_that_work([7]) == [(7, threading.current_thread())]


def test_several_items_are_worked_on_by_threads_and_come_in_order():
    found = threads_that_work(range(9))
    assert [item for item, _ in found] == list(range(9))
    assert threading.current_thread() not in {thread for _, thread in found}


def test_nothing_is_no_work():
    assert threads_that_work([]) == []

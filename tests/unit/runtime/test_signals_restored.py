"""A process handles signals only while it runs."""

import os
import signal

import pytest

from deltawire.errors import InputError
from deltawire.runtime.process import Process
from deltawire.store import open_bucket


def handlers():
    return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]


def new_process(*, supervised):
    return Process(open_bucket("memory://"), "w0", "worker", supervised=supervised)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_it_to_stop(number):
    process = new_process(supervised=False)
    with process.running():
        assert not process.stopping
        os.kill(os.getpid(), number)
        process.wait(60)
        assert process.stopping


def test_the_handlers_of_before_return():
    before = handlers()
    with new_process(supervised=False).running():
        assert handlers() != before
    assert handlers() == before


def test_they_return_after_an_error():
    before = handlers()
    with pytest.raises(InputError), new_process(supervised=False).running():
        raise InputError("x")
    assert handlers() == before


def test_a_supervised_process_ends_with_its_own():
    process = new_process(supervised=True)
    with process.handling_signals():
        inside = handlers()
    assert handlers() == inside, "a late SIGTERM would be reported as a failure"

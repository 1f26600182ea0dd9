"""Runs tests in forked processes, which share what collecting them imported.

    parent: collects ── fork ──▶ child: takes a file, runs its tests ── reports ──▶ parent: prints
                                 (the numbers of files wait in one pipe)

Processes of xdist each import all modules and collect all tests, in 28 s of processor time. A
file's tests stay in one process, since they share servers and models; those of `APART` share
nothing, and in one process would outlast all others.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import struct
import sys
import time
import traceback
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace

import pytest
from _pytest.config import create_terminal_writer

APART = ("tests/protocol/test_protocol.py",)
NUMBER = struct.Struct("=H")
GRACE_S = 30.0
CHECK_EVERY_S = 5.0
DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl


def batches_of(items):
    """Returns the places of the tests of each file, in order of first appearance."""
    batches = {}
    for place, item in enumerate(items):
        file = item.nodeid.split("::")[0]
        batches.setdefault(item.nodeid if file in APART else file, []).append(place)
    return list(batches.values())


def pytest_addoption(parser):
    parser.getgroup("forks")._addoption(
        "-n",
        dest="processes",
        type=int,
        default=0,
        metavar="N",
        help="run tests in N forked processes, a file in one of them",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    """Runs the collected tests in forked processes, if some are asked for."""
    option = session.config.option
    if not option.processes or option.collectonly or session.testsfailed:
        return None
    session.config.pluginmanager.get_plugin("terminalreporter").showfspath = False
    left = session.items
    while left:  # A process that dies leaves tests to others.
        before, left = len(left), Round(session, left).run(option.processes)
        if len(left) == before:
            raise session.Failed("the processes of the tests end before they run one")
    return True


class Round:
    """Runs tests until all are done, or each process has ended."""

    def __init__(self, session, items):
        self.session, self.hook, self.items = session, session.config.hook, items
        self.batches = batches_of(items)
        self.done, self.running, self.pids = set(), {}, {}

    def run(self, processes):
        """Returns the tests that did not run because a process died."""
        numbers, write = os.pipe()
        for number in range(len(self.batches)):  # Two bytes each: far below a pipe's 64 KiB.
            os.write(write, NUMBER.pack(number))
        os.close(write)
        base = self.session.config._tmp_path_factory.mktemp("p")
        try:
            for number in range(min(processes, len(self.batches))):
                self._fork(numbers, base / str(number))
            while self.pids:
                ready = wait(list(self.pids), CHECK_EVERY_S)
                for reports in ready or list(self.pids):
                    self._receive(reports, sent=bool(ready))
                if stop := self.session.shouldfail or self.session.shouldstop:
                    raise self.session.Failed(stop)
        finally:
            os.close(numbers)
            for reports, pid in self.pids.items():
                reports.close()
                os.kill(pid, signal.SIGINT)
            for pid in self.pids.values():
                _end(pid)
        return [item for place, item in enumerate(self.items) if place not in self.done]

    def _fork(self, numbers, base):
        read, write = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            self._run_child(numbers, Connection(write, readable=False), base)
        os.close(write)
        self.pids[Connection(read, writable=False)] = pid

    def _receive(self, reports, *, sent):
        """Takes a message, or the end of a process. A process that it forked may hold its pipe
        open, so it is asked for too when nothing is ``sent``."""
        try:
            if not sent:
                ended, status = os.waitpid(self.pids[reports], os.WNOHANG)
                if ended:
                    self._ended(reports, status)
                return
            kind, value = reports.recv()
        except (EOFError, OSError):  # The latter in the middle of a message.
            _, status = os.waitpid(self.pids[reports], 0)
            self._ended(reports, status)
            return
        if kind == "report":
            restored = self.hook.pytest_report_from_serializable(
                config=self.session.config, data=value
            )
            self.hook.pytest_runtest_logreport(report=restored)
            return
        item = self.items[value]
        if kind == "start":
            self.running[reports] = value
            self.hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        else:
            self.done.add(self.running.pop(reports))
            self.hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def _ended(self, reports, status):
        del self.pids[reports]
        code = os.waitstatus_to_exitcode(status)
        if reports in self.running:
            self._died(self.running[reports], code)
        elif code:
            self.session.shouldfail = f"a process of the tests ended with {code} after its tests"

    def _died(self, place, status):
        self.done.add(place)
        item = self.items[place]
        self.hook.pytest_runtest_logreport(
            report=pytest.TestReport(
                item.nodeid, item.location, {}, "failed", f"its process ended with {status}", "call"
            )
        )

    def _run_child(self, numbers, reports, base):
        """Runs batches of tests until none is left, and ends this process."""
        status = 1
        atexit._clear()
        try:
            _settle(self.session, reports, base)
            self._run_batches(numbers, reports)
            status = 0
        except KeyboardInterrupt:
            # A terminal's Ctrl-C comes twice, from the parent too: fixtures end undisturbed.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            status = 130
        except BaseException:
            traceback.print_exc()
        finally:
            try:
                self.session._setupstate.teardown_exact(None)
                atexit._run_exitfuncs()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)

    def _run_batches(self, numbers, reports):
        def take():
            number = os.read(numbers, NUMBER.size)
            return list(self.batches[NUMBER.unpack(number)[0]]) if number else []

        waiting = take()
        while waiting:
            place = waiting.pop(0)
            # Fixtures of a session or module stay for the next test, which has to be known.
            waiting = waiting or take()
            item, following = self.items[place], self.items[waiting[0]] if waiting else None
            reports.send(("start", place))
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            reports.send(("finish", place))


class Relay:
    """Sends reports to the parent, in place of the plugins that show them."""

    def __init__(self, config, reports):
        self.config, self.reports = config, reports

    def pytest_runtest_logreport(self, report):
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.reports.send(("report", data))


def _end(pid):
    """Waits for a child that was interrupted, and kills it if its fixtures do not end."""
    deadline = time.monotonic() + GRACE_S
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _settle(session, reports, base):
    """Gives a child temporary files and captured output, and lets it report to its parent."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGINT)
    config = session.config
    base.mkdir()
    config._tmp_path_factory._basetemp = base
    os.environ["XDG_STATE_HOME"] = str(base / "state")
    capturing = config.pluginmanager.get_plugin("capturemanager")
    capturing.stop_global_capturing()
    capturing.start_global_capturing()
    capturing.suspend_global_capture()
    kept = (session, config.pluginmanager.get_plugin("logging-plugin"))  # It fills caplog, too.
    for shown in config.hook.pytest_runtest_logreport.get_hookimpls():
        if shown.plugin not in kept:
            config.pluginmanager.unregister(shown.plugin)
    # pytest-timeout writes to it, and ends no test without it.
    config.pluginmanager.register(
        SimpleNamespace(_tw=create_terminal_writer(config, sys.stderr)), "terminalreporter"
    )
    config.pluginmanager.register(Relay(config, reports))

"""Says which tests take processor time, of the processes that they start too."""

import os
from collections import Counter

import pytest

START = pytest.StashKey[float]()
NAME = "processor seconds"


def seconds():
    """Processor time of this process and of its children that have ended."""
    return sum(os.times()[:4])


def pytest_addoption(parser):
    parser.addoption(
        "--processor-time",
        type=int,
        default=0,
        metavar="N",
        help="list the N tests and files that took most processor time",
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    item.stash[START] = seconds()
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item, call):
    """Notes the time in the last report of a test, after its fixtures have ended."""
    if call.when == "teardown":
        item.user_properties.append((NAME, seconds() - item.stash[START]))


def pytest_terminal_summary(terminalreporter, config):
    if not (shown := config.getoption("processor_time")):
        return
    tests = {
        report.nodeid: value
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == NAME
    }
    files = Counter()
    for nodeid, value in tests.items():
        files[nodeid.split("::")[0]] += value
    terminalreporter.section(f"{sum(tests.values()):.0f} s of processor time in tests")
    for most in (files, Counter(tests)):
        for name, value in most.most_common(shown):
            terminalreporter.write_line(f"{value:8.1f} s {name}")

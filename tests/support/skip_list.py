"""Fails a session in which a test was skipped that no list names.

A test that is skipped everywhere tests nothing without failing. The list says which tests may
be skipped and why; it grows only by a change that a reviewer sees.
"""

import tomllib


class SkipList:
    """A pytest plugin that compares skipped tests with a file of ``"path::test" = "reason"``.

    A name without parameters stands for all of them, a path for all tests of the file.
    """

    def __init__(self, path):
        self.path = path
        self.allowed = tomllib.loads(path.read_text())
        self.unlisted = {}

    def permits(self, nodeid):
        """Tell whether the list names this test, or the file that it is in."""
        test = nodeid.split("[")[0].removeprefix("tests/")
        return test in self.allowed or test.split("::")[0] in self.allowed

    def note(self, nodeid, reason):
        """Remember a skipped test that is not on the list."""
        if not self.permits(nodeid):
            self.unlisted[nodeid] = reason

    def pytest_runtest_logreport(self, report):
        if report.skipped and not hasattr(report, "wasxfail"):
            self.note(report.nodeid, str(report.longrepr[-1]))

    def pytest_collectreport(self, report):
        if report.skipped:
            self.note(report.nodeid, str(report.longrepr[-1]))

    def pytest_sessionfinish(self, session):
        if self.unlisted and session.exitstatus == 0:
            session.exitstatus = 1

    def pytest_terminal_summary(self, terminalreporter):
        if self.unlisted:
            terminalreporter.section(f"skipped, and not listed in {self.path.name}", red=True)
            for nodeid, reason in sorted(self.unlisted.items()):
                terminalreporter.line(f"{nodeid}: {reason}")

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
        self.listed, self.unlisted = set(), {}

    def entry_for(self, nodeid):
        """The entry of the list that names this test, or the file that it is in, if one does."""
        test = nodeid.split("[")[0].removeprefix("tests/")
        return next((name for name in (test, test.split("::")[0]) if name in self.allowed), None)

    def note(self, nodeid, reason):
        """Remember a skipped test, and whether the list names it."""
        entry = self.entry_for(nodeid)
        if entry is None:
            self.unlisted[nodeid] = reason
        else:
            self.listed.add(entry)

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
        if self.listed:
            terminalreporter.section("not tested on this machine")
            for name in sorted(self.listed):
                terminalreporter.line(f"{name}: {self.allowed[name]}")
        if self.unlisted:
            terminalreporter.section(f"skipped, and not listed in {self.path.name}", red=True)
            for nodeid, reason in sorted(self.unlisted.items()):
                terminalreporter.line(f"{nodeid}: {reason}")

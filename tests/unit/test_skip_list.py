"""A skipped test that the list does not name fails the session."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from skip_list import SkipList


@pytest.fixture
def listed(tmp_path):
    path = tmp_path / "skips.toml"
    path.write_text('"unit/test_a.py::test_gpu" = "needs a GPU"\n"unit/test_b.py" = "needs root"\n')
    return SkipList(path)


def skipped(nodeid):
    return SimpleNamespace(nodeid=nodeid, skipped=True, longrepr=("file", 1, "Skipped: why"))


@pytest.mark.parametrize(
    ("nodeid", "status"),
    [
        ("tests/unit/test_a.py::test_gpu[cuda-1]", 0),
        ("tests/unit/test_b.py::test_anything", 0),
        ("tests/unit/test_b.py", 0),
        ("tests/unit/test_a.py::test_other", 1),
        ("tests/unit/test_c.py", 1),
    ],
)
def test_only_listed_tests_may_be_skipped(listed, nodeid, status):
    session = SimpleNamespace(exitstatus=0)
    listed.pytest_runtest_logreport(skipped(nodeid))
    listed.pytest_sessionfinish(session)
    assert session.exitstatus == status
    assert list(listed.unlisted.values()) == ["Skipped: why"] * status


def test_a_failed_session_keeps_its_status(listed):
    session = SimpleNamespace(exitstatus=2)
    listed.pytest_collectreport(skipped("tests/unit/test_c.py"))
    listed.pytest_sessionfinish(session)
    assert session.exitstatus == 2


def test_the_summary_says_what_was_not_tested(listed):
    for number in (1, 2):
        listed.pytest_runtest_logreport(skipped(f"tests/unit/test_b.py::test_{number}"))
    reporter = Mock()
    listed.pytest_terminal_summary(reporter)
    assert [call.args for call in reporter.line.call_args_list] == [("unit/test_b.py: needs root",)]

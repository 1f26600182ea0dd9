"""Tests in forked processes: every test reports once, also those that a dead process left."""

import os
import subprocess
import sys
import time
from pathlib import Path

SUPPORT = Path(__file__).parents[1] / "support"


def run(folder, *arguments, **output):
    plain = ["-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=", "--rootdir", "."]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "forks", *plain, "-rA", "-n", "2", *arguments, "."],
        check=False,
        env={**os.environ, "PYTHONPATH": str(SUPPORT)},
        cwd=folder,
        text=True,
        **(output or {"capture_output": True}),
    )


def test_a_dead_process_fails_one_test_and_leaves_the_others(tmp_path):
    (tmp_path / "test_dies.py").write_text(
        "import os, pytest\n"
        "@pytest.fixture(scope='module')\n"
        "def pid():\n"
        "    yield os.getpid()\n"
        "    print('the module ends')\n"
        "def test_first(pid): assert pid == os.getpid()\n"
        "def test_dies(pid): os.kill(os.getpid(), 9)\n"
        "def test_after(pid, tmp_path): assert pid == os.getpid() and tmp_path.is_dir()\n"
    )
    (tmp_path / "test_fails.py").write_text(
        "import subprocess, pytest\n"
        "def test_fails():\n"
        "    subprocess.run(['echo', 'printed by a child'])\n"
        "    assert [1] == [2]\n"
        "def test_skips(): pytest.skip('no reason')\n"
        "def test_logs(caplog, recwarn, capsys, monkeypatch):\n"
        "    import logging, warnings\n"
        "    logging.getLogger('x').warning('logged')\n"
        "    warnings.warn('warned')\n"
        "    print('printed')\n"
        "    assert (caplog.messages, len(recwarn), capsys.readouterr().out) == (\n"
        "        ['logged'], 1, 'printed\\n')\n"
    )
    ran = run(tmp_path)
    lines = ran.stdout.splitlines()
    assert ran.returncode == 1
    assert "2 failed, 3 passed, 1 skipped" in lines[-1], ran.stdout
    for line in (
        "its process ended with -9",
        "printed by a child",
        "PASSED test_dies.py::test_first",
        "FAILED test_dies.py::test_dies - its process ended with -9",
        "PASSED test_dies.py::test_after",
        "PASSED test_fails.py::test_logs",
        "FAILED test_fails.py::test_fails - assert [1] == [2]",
    ):
        assert lines.count(line) == 1, ran.stdout
    assert ran.stdout.count("the module ends") == 1


def test_the_first_failure_ends_other_processes_if_asked(tmp_path):
    (tmp_path / "test_fails.py").write_text(
        "import pathlib, time\n"
        "def test_fails():\n"
        "    while not pathlib.Path('started').exists(): time.sleep(.01)\n"
        "    assert 0\n"
    )
    # A process knows its next test before it runs one, so the third file is another's.
    (tmp_path / "test_next.py").write_text("def test_next(): pass\n")
    (tmp_path / "test_waits.py").write_text(
        "import pathlib, time\n"
        "def test_waits():\n"
        "    try:\n"
        "        pathlib.Path('started').touch()\n"
        "        time.sleep(100)\n"
        "    finally: pathlib.Path('ended').touch()\n"
    )
    ran = run(tmp_path, "-x")
    assert (ran.returncode, (tmp_path / "ended").exists()) == (1, True), ran.stdout


def test_a_test_that_takes_too_long_ends_by_its_timeout(tmp_path):
    (tmp_path / "test_slow.py").write_text(
        "import time, pytest\n"
        "@pytest.mark.timeout(1)\n"
        "def test_slow():\n"
        "    while True:\n"
        "        try: time.sleep(30)\n"
        "        except Exception: pass\n"
        "def test_after(): pass\n"
    )
    ran = run(tmp_path)
    assert "1 failed, 1 passed" in ran.stdout.splitlines()[-1], ran.stdout
    assert "Timeout" in ran.stdout


def test_a_dead_process_whose_own_child_holds_its_pipe_is_noticed(tmp_path):
    (tmp_path / "test_forks.py").write_text(
        "import os, time\n"
        "def test_forks():\n"
        "    if os.fork() == 0:\n"
        "        time.sleep(60)\n"
        "        os._exit(0)\n"
        "    os.kill(os.getpid(), 9)\n"
        "def test_after(): pass\n"
    )
    began = time.monotonic()
    with (tmp_path / "output").open("w") as output:  # A pipe would be held open, too.
        run(tmp_path, stdout=output)
    assert time.monotonic() - began < 55
    assert "1 failed, 1 passed" in (tmp_path / "output").read_text().splitlines()[-1]


def test_processes_that_cannot_begin_fail_the_run(tmp_path):
    (tmp_path / "conftest.py").write_text(
        "import forks\ndef fails(*_): raise OSError('no space')\nforks._settle = fails\n"
    )
    (tmp_path / "test_one.py").write_text("def test_one(): pass\n")
    ran = run(tmp_path)
    assert ran.returncode not in (0, 5), ran.stdout

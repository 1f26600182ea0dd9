"""Nothing that a worker starts inherits its credentials or can read its memory."""

import os
import subprocess
import sys

import pytest

from deltawire.rl.rollout.hardening import CREDENTIALS, protect_credentials

PROTECTED = """
import ctypes, os, subprocess, sys
from deltawire.rl.rollout.hardening import CREDENTIALS, protect_credentials
protect_credentials()
child = "import os, sys; print([n for n in sys.argv[1:] if n in os.environ])"
print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))
print(os.stat("/proc/self/environ").st_uid)
print(subprocess.check_output([sys.executable, "-c", child, *CREDENTIALS], text=True), end="")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="processes of others are read through /proc")
def test_a_worker_is_not_dumpable_and_its_children_inherit_no_credentials():
    environment = {**os.environ, **dict.fromkeys(CREDENTIALS, "secret")}
    found = subprocess.run(
        [sys.executable, "-c", PROTECTED],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    dumpable, owner, inherited = found.stdout.splitlines()
    assert dumpable == "0"
    assert owner == "0", "the kernel gives the files of such a process to root"
    assert inherited == "[]"


def test_only_credentials_are_removed(monkeypatch):
    monkeypatch.setattr("sys.platform", "other")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    assert "AWS_SECRET_ACCESS_KEY" in protect_credentials()
    assert os.environ["AWS_REGION"] == "eu-central-1"

"""Nothing that a worker starts inherits its credentials or can read its memory."""

import os
import subprocess
import sys

import pytest

from deltawire.errors import InputError
from deltawire.rl.rollout.hardening import CREDENTIALS, protect_credentials
from deltawire.store import open_bucket
from deltawire.store.repeats import opened_again

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


def test_an_open_bucket_still_has_them_for_its_later_connections(monkeypatch, s3_server):
    """A bucket connects for its first request, and again for evidence and after errors."""
    monkeypatch.setattr("sys.platform", "other")
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://127.0.0.1:1")  # Nobody answers.
    s3_server.make_bucket("later")
    bucket = open_bucket("s3://later/run", retry_config={"max_retries": 0})
    assert "AWS_SECRET_ACCESS_KEY" in protect_credentials()
    assert "AWS_SECRET_ACCESS_KEY" not in os.environ
    bucket.put("one", b"1")
    bucket.reconnect()
    assert bucket.get("one", limit=10) == b"1"


@pytest.mark.parametrize(
    ("url", "variable"),
    [
        ("az://container/run", "AZURE_STORAGE_ACCOUNT_KEY"),
        ("az://container/run", "AZURE_STORAGE_SAS_KEY"),
        ("az://container/run", "AZURE_STORAGE_TOKEN"),
        ("s3://bucket/run", "AWS_SESSION_TOKEN"),
    ],
)
def test_the_stores_of_other_providers_keep_theirs_too(monkeypatch, url, variable):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    monkeypatch.setenv(variable, "sig=c2VjcmV0" if "SAS" in variable else "c2VjcmV0")
    bucket = open_bucket(url)
    monkeypatch.delenv(variable)
    again = opened_again(bucket.store)
    assert "c2VjcmV0" in str(again.__getnewargs_ex__())
    assert "c2VjcmV0" not in repr(bucket)


def test_an_error_names_the_file_of_an_account_and_shows_no_other_value(monkeypatch):
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", "/no/such/file")
    with pytest.raises(InputError, match="/no/such/file"):
        open_bucket("gs://bucket/run")
    monkeypatch.delenv("GOOGLE_SERVICE_ACCOUNT")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/hunter2")
    with pytest.raises(InputError) as error:
        open_bucket("gs://bucket/run")
    assert "hunter2" not in str(error.value)

"""Azurite, Microsoft's emulator of Azure Blob Storage, passes the store suite.

Needs Node 20 or newer and ``npm install azurite``; ``AZURITE`` names its ``azurite-blob``.
"""

import base64
import hashlib
import hmac
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from email.utils import formatdate
from itertools import count

import pytest

from deltawire.store import open_bare_bucket
from deltawire.testing.store_suite import StoreSuite

pytestmark = pytest.mark.drills

AZURITE = os.environ.get("AZURITE") or shutil.which("azurite-blob")
ACCOUNT = "devstoreaccount1"
"""The account that Azurite's documentation states, with its key."""
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
NUMBERS = count()


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def create_container(port, name):
    """Makes a container, once the server answers; obstore makes none."""
    date, version = formatdate(usegmt=True), "2021-08-06"
    signed = f"x-ms-date:{date}\nx-ms-version:{version}\n/{ACCOUNT}/{ACCOUNT}/{name}"
    text = "PUT" + "\n" * 12 + signed + "\nrestype:container"
    mac = hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/{ACCOUNT}/{name}?restype=container",
        method="PUT",
        headers={
            "x-ms-date": date,
            "x-ms-version": version,
            "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(mac).decode()}",
            "Content-Length": "0",
        },
    )
    for _ in range(300):
        try:
            urllib.request.urlopen(request).close()
        except OSError:  # Not listening yet.
            time.sleep(0.2)
        else:
            return
    raise AssertionError("Azurite does not answer")


@pytest.fixture(scope="module")
def azurite(tmp_path_factory):
    if not AZURITE:
        pytest.skip("Azurite is missing")
    port, folder = free_port(), tmp_path_factory.mktemp("azurite")
    options = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder)]
    options += ["--silent", "--skipApiVersionCheck", "--disableTelemetry"]
    with subprocess.Popen([AZURITE, *options]) as server:
        create_container(port, "drills")
        yield f"http://127.0.0.1:{port}/{ACCOUNT}"
        server.terminate()


class TestAzurite(StoreSuite):
    @pytest.fixture
    def bucket(self, azurite):
        return open_bare_bucket(
            f"az://drills/{next(NUMBERS)}",
            account_name=ACCOUNT,
            account_key=KEY,
            endpoint=azurite,
            client_options={"allow_http": True},
        )

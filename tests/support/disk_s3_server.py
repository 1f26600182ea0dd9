"""An S3 server that keeps its objects on a disk, so that it can be killed and started again.

It is LocalBucket, from PyPI: a process with a thread for each connection. Buckets are folders.
"""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from deltawire.store import Bucket, DelegatingBucket, open_bare_bucket

START_S = 60.0
BUCKET = "drills"


class DiskS3Server:
    """Serves ``folder`` with the bucket `BUCKET` on a loopback port, which stays the same."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / BUCKET).mkdir(parents=True, exist_ok=True)
        self.port = _free_port()
        self.answers = threading.Event()
        self.start()

    def start(self) -> None:
        """Starts the process, and waits until it accepts connections."""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "localbucket", str(self.folder), "--port", str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                break
            except OSError as error:
                if self._process.poll() is not None or time.monotonic() > until:
                    raise AssertionError("the S3 server does not start") from error
                time.sleep(0.01)
        self.answers.set()

    def kill(self) -> None:
        """Ends the process at once, whatever it does."""
        self.answers.clear()
        self._process.kill()
        self._process.wait()

    def open_bare(self, path: str, **options: Any) -> Bucket:
        """Opens a place in its bucket."""
        return open_bare_bucket(
            f"s3://{BUCKET}/{path}",
            endpoint=f"http://127.0.0.1:{self.port}",
            access_key_id="testing",
            secret_access_key="testing",  # The server checks none.
            region="us-east-1",
            **options,
        )


def _free_port() -> int:
    """A port below those that connections get, so that none takes it while the server is down."""
    while True:
        port = random.randrange(20_000, 30_000)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port


class KillsItsServer(DelegatingBucket):
    """Kills the server as soon as request number ``at`` has begun, and starts it again. No request
    begins in between; those that are under way meet its end."""

    def __init__(self, inner: Bucket, server: DiskS3Server, at: int) -> None:
        super().__init__(inner)
        self._server = server
        self._left = at
        self._counting = threading.Lock()
        self.killing = threading.Thread(target=self._kill)

    def _kill(self) -> None:
        self._server.kill()
        self._server.start()

    def _call(self, verb: Any, key: str, operation: Any) -> Any:
        self._server.answers.wait(START_S)
        with self._counting:
            self._left -= 1
            if self._left == 0:
                self.killing.start()
        return operation()

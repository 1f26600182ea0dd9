"""Runs a server for Tinker's SDK in a process that can be killed."""

import contextlib
import copy
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import torch

from benchmarks.ports import free_port
from deltawire.config import BuildConfig
from deltawire.export.models import save_model
from deltawire.train.build import build_model, byte_tokenizer

TOKEN = "tml-test"
SIZES = BuildConfig(hidden_size=32, layers=2, head_size=16, feed_forward_size=48, context=128)
PATIENCE_S = 120


def make_model(folder: Path, *, tied: bool = True) -> Path:
    """Writes a byte-level model as ``folder/org/tiny``, with its head tied to the embedding."""
    path = folder / "org" / "tiny"
    model = build_model(SIZES, seed=1)
    if not tied:
        torch.manual_seed(1)
        config = copy.deepcopy(model.config)
        config.tie_word_embeddings = False
        model = type(model)(config)
    save_model(model, byte_tokenizer(), path)
    return path


class ServerProcess:
    """``deltawire tinker`` as a process on one port, which can be killed and started again."""

    def __init__(self, bucket, model, *arguments):
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._command = [sys.executable, "-m", "deltawire", "tinker", str(bucket)]
        self._command += ["--model", str(model), "--port", str(port), *arguments]
        self._process = None

    def start(self):
        env = os.environ | {"DELTAWIRE_TOKEN": TOKEN, "DELTAWIRE_DURABLE": "0"}
        self._process = subprocess.Popen(
            self._command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        line = self._process.stderr.readline().decode()
        assert line.startswith("serving"), line + self._process.stderr.read().decode()
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.url}/api/v1/healthz", timeout=10).close()
                return self
            time.sleep(0.1)
        raise AssertionError("the server does not answer")

    @property
    def pid(self):
        return self._process.pid

    def kill(self):
        self._process.kill()
        self.wait()

    def stop(self):
        self._process.terminate()
        self.wait()

    def wait(self):
        with self._process.stderr:
            self._process.stderr.read()
        self._process.wait(PATIENCE_S)

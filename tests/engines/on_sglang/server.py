"""An SGLang server under test, on a private path, and how to ask it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from planting import ANSWERS, encoded

START_WITHIN_S = 1500
"""Seconds; half a minute on two quiet cores, 7 minutes were seen with 40 busy processes on them."""


@dataclass(frozen=True)
class Answer:
    """The result of one request, with log-probabilities kept to the bit."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[tuple[int, int, int], ...]
    cached: int


def planted(folder, entry):
    """A folder for ``PYTHONPATH`` with a plugin of SGLang, loaded before deltawire's."""
    information = folder / "aaa_planting-0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: aaa-planting\nVersion: 0\n")
    (information / "entry_points.txt").write_text(f"[sglang.srt.plugins]\naaa = {entry}\n")
    return folder


class Connection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path):
        super().__init__("localhost", timeout=120)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


class Server:
    """An SGLang server for ``model`` that follows ``run``, if there is one; a context manager.

    ``plants`` is the entry point of a further plugin.
    """

    caches = True

    def __init__(self, model, *arguments, run=None, plants="planting:register", **settings):
        self.folder = tempfile.TemporaryDirectory(prefix="dw-sglang-test-")
        self.path = str(Path(self.folder.name) / "http")
        self.log = Path(self.folder.name) / "log"
        environment = dict(os.environ)
        if run is not None:
            environment["DELTAWIRE_FOLLOW"] = json.dumps({"run": run, **settings})
            folders = [planted(Path(self.folder.name) / "plants", plants), *sys.path[:3]]
            environment["PYTHONPATH"] = os.pathsep.join(
                [*map(str, folders), environment.get("PYTHONPATH", "")]
            )
        with self.log.open("wb") as log:
            self.process = self._started(model, arguments, environment, log)

    def _started(self, model, arguments, environment, log):
        return subprocess.Popen(
            [
                sys.executable, "-m", "deltawire.engines.sglang.private_server", self.path,
                "--model-path", str(model), "--device", "cpu", "--attention-backend",
                "torch_native", "--sampling-backend", "pytorch", "--grammar-backend", "none",
                "--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill",
                "disabled", "--skip-tokenizer-init", "--skip-server-warmup",
                "--max-total-tokens", "4096", "--max-running-requests", "16",
                "--mem-fraction-static", "0.2", "--dtype", "bfloat16", "--random-seed", "0",
                "--sleep-on-idle", "--log-level", "warning", *arguments,
            ],
            stdout=log, stderr=subprocess.STDOUT, env=environment,
            start_new_session=True,
        )  # fmt: skip

    def wait(self):
        """Wait until it answers."""
        deadline = time.monotonic() + START_WITHIN_S
        while True:
            try:
                self.call("/model_info", method="GET")
                return self
            except OSError:
                assert self.process.poll() is None, self.said()
                assert time.monotonic() < deadline, self.said()
                time.sleep(0.2)

    def said(self):
        """The end of its log."""
        return self.log.read_text(errors="replace")[-6000:]

    def __enter__(self):
        try:
            return self.wait()
        except BaseException:  # No test ends a server that did not start.
            self.end()
            raise

    def __exit__(self, *_):
        self.end()

    def end(self, number=signal.SIGKILL):
        """Send all of its processes a signal, and wait for them to end."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
        self.process.wait(60)

    def ask(self, path, body=None, *, method="POST"):
        """The status and the text of an answer."""
        connection = Connection(self.path)
        try:
            connection.request(
                method, path, None if body is None else json.dumps(body),
                {"Content-Type": "application/json"},
            )  # fmt: skip
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def call(self, path, body=None, *, method="POST"):
        """The answer of a call that succeeds."""
        status, text = self.ask(path, body, method=method)
        assert status == 200, (status, text[:2000])
        return json.loads(text)

    def engine_call(self, method, *arguments):
        """One of deltawire's methods."""
        body = {"method": method, "args": [str(one) for one in arguments]}
        return self.call("/collective_rpc", body)["results"][0]

    def attest(self):
        """Have the live bits of all ranks checked."""
        return self.engine_call("deltawire_attest")

    def plant(self, fault, *args):
        """A fault of `planting`: what each rank says of it."""
        self.call("/set_internal_state", {"server_args": encoded(fault, *args)})
        return self.call("/server_info", method="GET")["internal_states"][0][ANSWERS]

    def close(self):
        """End it."""
        self.end()

    def abandon(self):
        """Let go of what has died."""
        self.end()

    def generate(self, prompts, *, tokens=24):
        """Greedy answers to prompts that run at the same time."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.answer(prompt, tokens=tokens), prompts))

    def status(self):
        """The engine's own word."""
        return self.engine_call("deltawire_status")

    def reach(self, version, *, within_s=120.0):
        """Wait until it serves ``version``; its status then."""
        deadline = time.monotonic() + within_s
        while (status := self.status())["version"] != version or status["phase"] != "serving":
            assert time.monotonic() < deadline, f"version {version} was not reached: {status}"
            time.sleep(0.02)
        return status

    def fail(self, *, within_s=120.0):
        """Wait until something went wrong; what it says of it."""
        deadline = time.monotonic() + within_s
        while not (failure := self.status()["failure"]):
            assert time.monotonic() < deadline, "nothing went wrong"
            time.sleep(0.02)
        return failure

    def answer(self, prompt, *, tokens=12):
        """A greedy answer to a prompt of token ids."""
        given = self.call(
            "/generate",
            {
                "input_ids": list(prompt), "return_logprob": True,
                "sampling_params": {
                    "temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True,
                },
            },
        )  # fmt: skip
        about = given["meta_info"]
        return Answer(
            tuple(given["output_ids"]),
            tuple(one[0] for one in about["output_token_logprobs"]),
            tuple(
                (int(s["version"]), s["start"], s["end"])
                for s in about.get("weight_versions", ())
                if s["version"] != "default"
            ),
            about["cached_tokens"],
        )

"""A ``vllm serve`` process under test, and how to ask it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

from shapes import LAYERS

START_WITHIN_S = 1200
"""Seconds; over 7 minutes were seen with many busy processes on two cores."""


def adapter_arguments(run):
    """Arguments of a server that follows ``run`` with an adapter of all layers in a slot."""
    return [
        "--additional-config", json.dumps({"deltawire": {"run": run}}), "--enable-lora",
        "--max-lora-rank", "8", "--lora-target-modules", *LAYERS,
    ]  # fmt: skip


class Server:
    """A ``vllm serve`` process of ``python`` on loopback, as a context manager."""

    def __init__(self, model, log, *arguments, tokenizer=False, python=sys.executable):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.log = log
        environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1"}
        environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
        self.process = subprocess.Popen(
            [
                python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
                "--host", "127.0.0.1", "--port", str(self.port),
                *([] if tokenizer else ["--skip-tokenizer-init"]),
                "--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "256",
                "--kv-cache-memory-bytes", str(64 << 20), "--block-size", "32", "--seed", "0",
                "--max-num-seqs", "16", "--enable-scale-out", *arguments,
            ],
            stdout=log.open("wb"), stderr=subprocess.STDOUT, env=environment,
            start_new_session=True,
        )  # fmt: skip

    def __enter__(self):
        deadline = time.monotonic() + START_WITHIN_S
        while True:
            try:
                self.call("/health", None, method="GET")
                return self
            except OSError:
                assert self.process.poll() is None, self.log.read_text()[-6000:]
                assert time.monotonic() < deadline, self.log.read_text()[-6000:]
                time.sleep(0.2)

    def __exit__(self, *_):
        self.end(signal.SIGTERM)

    def end(self, number=signal.SIGKILL):
        """Send all of its processes a signal, and wait for them to end."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(30)

    def call(self, path, body, *, method="POST"):
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
            method=method,
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            text = response.read()
        return json.loads(text) if text.strip() else None

    def generate(self, prompt, *, tokens=12):
        """Token ids and spans of versions, greedily."""
        return self.answer(prompt, tokens=tokens)[:2]

    def answer(self, prompt, *, tokens=12):
        """Token ids, spans of versions, and how many tokens of the prompt were cached (0 unless
        the server was started with ``--enable-prompt-tokens-details``), greedily."""
        answer = self.call(
            "/inference/v1/generate",
            {
                "token_ids": prompt,
                "sampling_params": {"temperature": 0.0, "max_tokens": tokens, "detokenize": False},
                "model": "",
            },
        )
        choice = answer["choices"][0]
        spans = [
            (span["version"], span["start"], span["end"]) for span in choice["weight_versions"]
        ]
        details = (answer["usage"] or {}).get("prompt_tokens_details") or {}
        return choice["token_ids"], spans, details.get("cached_tokens") or 0

    def engine_call(self, method, *arguments):
        """One of the engine's own methods."""
        return self.rank_calls(method, *arguments)[0]

    def rank_calls(self, method, *arguments):
        """A method of the workers: the answer of each rank."""
        body = {"method": method, "args": [str(one) for one in arguments]}
        return self.call("/collective_rpc", body)["results"]

    def move(self, version):
        """A version the way vLLM's documents say."""
        self.call("/start_weight_update", {})
        self.call("/update_weights", {"update_info": {"version": version, "wait": False}})
        self.call("/update_weights", {"update_info": {"version": version}})
        self.call("/pause?mode=keep", {})
        self.call("/finish_weight_update", {"weight_version": str(version)})
        self.call("/resume", {})

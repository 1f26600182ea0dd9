"""``vllm serve``, driven over its own weight-transfer calls, and following by itself."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest
from engine import prompts
from shapes import Trainer, build

from deltawire.store import open_bucket


class Server:
    """A ``vllm serve`` process on loopback, as a context manager."""

    def __init__(self, model, log, *arguments):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.log = log
        environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1"}
        environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
        self.process = subprocess.Popen(
            [
                sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
                "--host", "127.0.0.1", "--port", str(self.port), "--skip-tokenizer-init",
                "--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "256",
                "--kv-cache-memory-bytes", str(64 << 20), "--block-size", "32", "--seed", "0",
                "--max-num-seqs", "16", "--enable-scale-out", *arguments,
            ],
            stdout=log.open("wb"), stderr=subprocess.STDOUT, env=environment,
            start_new_session=True,
        )  # fmt: skip

    def __enter__(self):
        deadline = time.monotonic() + 400
        while True:
            try:
                self.call("/health", None, method="GET")
                return self
            except OSError:
                assert self.process.poll() is None, self.log.read_text()[-6000:]
                assert time.monotonic() < deadline, self.log.read_text()[-6000:]
                time.sleep(0.2)

    def __exit__(self, *_):
        os.killpg(self.process.pid, signal.SIGTERM)
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
        answer = self.call(
            "/inference/v1/generate",
            {
                "token_ids": prompt,
                "sampling_params": {"temperature": 0.0, "max_tokens": tokens, "detokenize": False},
                "model": "",
            },
        )
        choice = answer["choices"][0]
        return choice["token_ids"], [
            (span["version"], span["start"], span["end"]) for span in choice["weight_versions"]
        ]

    def engine_call(self, method, *arguments):
        """One of the engine's own methods."""
        answer = self.call("/collective_rpc", {"method": method, "args": list(arguments)})
        return answer["results"][0]

    def move(self, version):
        """A version the way vLLM's documents say."""
        self.call("/start_weight_update", {})
        self.call("/update_weights", {"update_info": {"version": version, "wait": False}})
        self.call("/update_weights", {"update_info": {"version": version}})
        self.call("/pause?mode=keep", {})
        self.call("/finish_weight_update", {"weight_version": str(version)})
        self.call("/resume", {})


@pytest.fixture(scope="module")
def trainer(tmp_path_factory, family):
    folder = tmp_path_factory.mktemp("trainer")
    bucket = open_bucket(str(folder / "bucket"), create=True)
    trainer = Trainer(bucket, build(family, folder / "model"))
    yield trainer
    trainer.close()


def test_a_server_is_moved_by_vllms_own_calls(trainer, tmp_path):
    run = trainer.publisher.bucket.url
    transfer = json.dumps({"backend": "deltawire"})
    question = prompts(1)[0]
    with Server(trainer.model, tmp_path / "log", "--weight-transfer-config", transfer) as server:
        server.call("/init_weight_transfer_engine", {"init_info": {"run": run, "follow": False}})
        first, spans = server.generate(question)
        assert spans == [(str(trainer.version), 0, 12)]
        for _ in range(3):
            version = trainer.publish(2)
            server.move(version)
            tokens, spans = server.generate(question)
            assert spans == [(str(version), 0, 12)]
        assert server.engine_call("deltawire_attest")["sound"]
        status = server.engine_call("deltawire_status")
        assert (status["version"], status["digest"]) == (version, trainer.publisher.digest.hex())
        # One that is not there is refused, and nothing has changed.
        server.call("/start_weight_update", {})
        with pytest.raises(urllib.error.HTTPError):
            server.call("/update_weights", {"update_info": {"version": version + 5}})
        assert server.generate(question)[0] == tokens
        # Back to an older one, led from outside.
        server.engine_call("deltawire_want", str(version - 6))
        deadline = time.monotonic() + 60
        while server.engine_call("deltawire_status")["version"] != version - 6:
            assert time.monotonic() < deadline, server.engine_call("deltawire_status")
            time.sleep(0.05)
        again, spans = server.generate(question)
        assert spans == [(str(version - 6), 0, 12)]
        assert again == first


@pytest.mark.parametrize("in_flight", ["recompute", "drain"])
def test_a_server_follows_and_treats_requests_in_flight_as_configured(trainer, tmp_path, in_flight):
    run = trainer.publisher.bucket.url
    told = json.dumps({"deltawire": {"run": run, "in_flight": in_flight}})
    with Server(trainer.model, tmp_path / "log", "--additional-config", told) as server:
        answers, stop = [], threading.Event()

        def ask(seed):
            question = prompts(1, seed=seed)[0]
            while not stop.is_set():
                answers.append(server.generate(question, tokens=64))

        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(4):
            version = trainer.publish()
            deadline = time.monotonic() + 60
            while server.engine_call("deltawire_status")["version"] != version:
                assert time.monotonic() < deadline, server.engine_call("deltawire_status")
                time.sleep(0.05)
        stop.set()
        for thread in threads:
            thread.join(60)
        assert all(spans[-1][2] == 64 == len(tokens) for tokens, spans in answers)
        mixed = [spans for _, spans in answers if len(spans) > 1]
        assert (mixed == []) == (in_flight == "drain")
        assert {span[0] for _, spans in answers for span in spans} >= {str(version)}
        assert server.engine_call("deltawire_attest")["sound"]

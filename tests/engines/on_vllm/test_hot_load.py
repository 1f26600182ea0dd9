"""`deltawire gateway` with a real `vllm serve`: hot-loading, readiness by attestation, proxying."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request

import pytest
from drills import prompts
from shapes import Trainer, build
from test_served_over_http import Server

from deltawire.export.snapshots import snapshot_identity
from deltawire.launch.live_secret import SecretPlace, create_secret
from deltawire.store import open_bucket
from deltawire.sync import read_run

TOKEN = "an admin token"
HOT_LOAD = "/hot_load/v1/models/hot_load"


class Front:
    """The command ``deltawire gateway`` on any free port."""

    def __init__(self, run, replica, log):
        self.log = log
        bucket, place = open_bucket(run), SecretPlace(log.with_suffix(".secret"))
        create_secret(bucket, read_run(bucket), place)
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [
                    sys.executable, "-m", "deltawire", "gateway", run, "--port", "0",
                    "--replica", replica, "--secret", str(place),
                ],
                stderr=file,
                env={**os.environ, "DELTAWIRE_TOKEN": "a", "DELTAWIRE_ADMIN_TOKEN": TOKEN},
            )  # fmt: skip
        deadline = time.monotonic() + 60
        while " on http://" not in log.read_text():
            assert self.process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        self.url = log.read_text().split(" on ")[1].split()[0]

    def call(self, path, body=None):
        request = urllib.request.Request(
            self.url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.loads(answer.read()), answer.headers

    def load(self, identity):
        self.call(HOT_LOAD, {"identity": identity})
        deadline = time.monotonic() + 90
        while True:
            (replica,) = self.call(HOT_LOAD)[0]["replicas"]
            if replica["readiness"] and replica["current_snapshot_identity"] == identity:
                return replica["digest"]
            assert time.monotonic() < deadline, replica
            time.sleep(0.1)

    def close(self):
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(30) == 0


@pytest.fixture
def trainer(tmp_path, family):
    bucket = open_bucket(str(tmp_path / "bucket"), create=True)
    trainer = Trainer(bucket, build(family, tmp_path / "model"))
    yield trainer
    trainer.close()


def test_a_snapshot_is_ready_when_vllm_serves_its_exact_bits(trainer, tmp_path):
    url = trainer.publisher.bucket.url
    first = trainer.version
    digests = {first: trainer.publisher.digest.hex()}
    told = json.dumps({"deltawire": {"run": url, "follow": False}})
    with Server(trainer.model, tmp_path / "log", "--additional-config", told) as server:
        run = read_run(open_bucket(url))
        front = Front(url, f"http://127.0.0.1:{server.port}", tmp_path / "front")
        body = {"model": str(trainer.model), "prompt": prompts(1)[0], "max_tokens": 8}
        body |= {"temperature": 0, "return_token_ids": True}
        answers = {}
        newest = trainer.publish(3)
        digests[newest] = trainer.publisher.digest.hex()
        for version in (newest, first, newest):  # Back and forth.
            identity = snapshot_identity(run, version)
            assert front.load(identity) == digests[version]
            answer, headers = front.call("/v1/completions", body)
            assert headers["x-deltawire-snapshot"] == identity
            tokens = answer["choices"][0]["token_ids"]
            assert answers.setdefault(version, tokens) == tokens
            assert tokens == server.generate(prompts(1)[0], tokens=8)[0]
        assert answers[first] != answers[newest]
        front.close()

"""A signed live run whose gateway, learner and trainer are killed, and whose bucket goes away.

Users of a gateway ask and report all the while. Afterwards every answer with a receipt that says
so is stored, every report that was taken is stored, and no answer was trained on twice.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path

import pytest
import tiny_config

from benchmarks.ports import free_port
from deltawire.live.deployment_secret import parse_secret
from deltawire.live.feedback.client import receipt_of
from deltawire.live.learning.records import LiveRecords
from deltawire.rl.control.lineages import read_lineages
from deltawire.runtime.heartbeat import read_heartbeat
from deltawire.runtime.signed_bucket import SignedBucket
from deltawire.store import open_bucket
from deltawire.sync import newest_version, read_manifest, read_run
from deltawire.wire.ledger import CommitMetadata
from deltawire.wire.receipts import ReceiptKeys, read_receipt
from deltawire.wire.roles import Pin
from deltawire.wire.signing import Ed25519Signer

pytestmark = [pytest.mark.drills, pytest.mark.timeout(600)]

CONFIG = f"""
name = "live"
{tiny_config.MODEL}[task]
environment = "simulated_users"
heldout = 10
[warm_start]
max_steps = 2
check_every = 2
[rollout]
workers = 0
group_size = 4
max_tokens = 4
slots = 16
context = 64
[train]
versions = 100000
groups_per_step = 1
max_staleness = 1000
anchor_every = 10
checkpoint_every = 3
loss.advantage = "given"
[trust]
rescore_share = 0.0
[evaluate]
every = 0
[live]
settle_s = 0.5
user_cap = 0.5
max_age_s = 36000.0
"""
TOKENS = {
    "DELTAWIRE_TOKEN": "sampling", "DELTAWIRE_ADMIN_TOKEN": "admin",
    "DELTAWIRE_REPLICA_KEY": "replica", "OMP_NUM_THREADS": "1",
}  # fmt: skip
PATIENCE_S = 200.0


def until(condition, what):
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.1)
    return found


class LiveRun:
    """The processes of one deployment, each by its command."""

    def __init__(self, folder):
        self.folder, self.location = folder, str(folder / "out" / "bucket")
        self.processes, self.port, self.replica_port = {}, free_port(), free_port()
        (folder / "live.toml").write_text(CONFIG)
        for name in ("owner", "gateway", "live"):
            Ed25519Signer.generate().write(folder / f"{name}.key")
        self.bucket = open_bucket(self.location, create=True)

    def key(self, name):
        return str(self.folder / f"{name}.key")

    def start(self, name):
        url = f"http://127.0.0.1:{self.replica_port}"
        commands = {
            "run": ["run", str(self.folder / "live.toml"), "--out", str(self.folder / "out"),
                    "--plain", "--key", self.key("owner")],
            "replica": ["replica", self.location, "--port", str(self.replica_port)],
            "gateway": ["gateway", self.location, "--port", str(self.port), "--replica", url,
                        "--capture-share", "1", "--key", self.key("gateway"),
                        "--secret", str(self.folder / "secret"),
                        "--state", str(self.folder / "state"), "--feedback-per-minute", "100000",
                        "--feedback-per-day", "1000000"],
            "learner": ["learner", self.location, "--key", self.key("live")],
        }  # fmt: skip
        public = ["--public-key", self.owner] if name != "run" else []
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "deltawire", *commands[name], *public],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, env={**os.environ, **TOKENS},
            )  # fmt: skip

    def make_secret(self):
        subprocess.run(
            [sys.executable, "-m", "deltawire", "live", "secret", "create", self.location,
             "--secret", str(self.folder / "secret"), "--key", self.key("gateway"),
             "--public-key", self.owner],
            check=True, capture_output=True, timeout=PATIENCE_S,
        )  # fmt: skip

    def claims(self, receipt):
        run = read_run(self.bucket, public_key=self.owner)
        (generation,) = parse_secret((self.folder / "secret").read_text(), place="")
        keys = ReceiptKeys({generation.fingerprint: generation.receipt_key})
        return read_receipt(receipt, keys=keys, run=run.id)

    @property
    def owner(self):
        return Ed25519Signer.read(Path(self.key("owner"))).public_key

    def grant(self, role, name):
        public = Ed25519Signer.read(Path(self.key(name))).public_key
        subprocess.run(
            [sys.executable, "-m", "deltawire", "grant", self.location, role, public,
             "--key", self.key("owner")],
            check=True, capture_output=True, timeout=PATIENCE_S,
        )  # fmt: skip

    def kill(self, name):
        if name == "trainer":  # Its supervisor, `deltawire run`, starts it again.
            beat = read_heartbeat(self.bucket, "trainer")
            if beat is not None:
                os.kill(beat.pid, signal.SIGKILL)
            return
        self.processes[name].kill()
        self.processes[name].wait()
        self.start(name)

    def is_ready(self):
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.port}/health", timeout=5
            ) as answer:
                return answer.status == 200
        except OSError:
            return False

    def stop(self):
        for name in ("learner", "gateway", "replica", "run"):
            process = self.processes.get(name)
            if process is None:
                continue
            process.send_signal(signal.SIGINT)
            try:
                process.wait(120)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Users(threading.Thread):
    """Asks and reports until told to stop, and notes what it was promised."""

    def __init__(self, run):
        super().__init__()
        self.url, self.stopping = f"http://127.0.0.1:{run.port}/v1", threading.Event()
        self.promised, self.taken, self.trouble = set(), set(), 0
        self.claims = run.claims

    def post(self, path, body, user=""):
        headers = {"Authorization": "Bearer sampling", "Content-Type": "application/json"}
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), headers | {"x-deltawire-user": user}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read())

    def run(self):
        number = 0
        while not self.stopping.is_set():
            number += 1
            try:
                self.ask(number)
            except (OSError, ValueError, urllib.error.HTTPError):
                self.trouble += 1
                self.stopping.wait(0.1)

    def ask(self, number):
        message = {"role": "user", "content": f"mail {number}"}
        body = {"model": "live", "messages": [message]}
        receipt = receipt_of(self.post("/chat/completions", body, f"user {number % 40}"))
        claims = self.claims(receipt)
        if claims.recorded:
            self.promised.add(claims.answer)
        report = {"receipt": receipt, "kind": "accept", "value": number % 2, "id": f"r{number}"}
        self.taken.add(self.post("/feedback", report)["id"])


def strike(run, chance):
    """Kill one process, or take the live part of the bucket away for a moment."""
    what = chance.choice(["gateway", "learner", "trainer", "outage"])
    if what != "outage":
        run.kill(what)
        return what
    live = Path(run.location) / "live" / "captures"
    away = run.folder / "away"
    if live.is_dir():
        live.rename(away)
        live.write_text("not a folder: every write below it fails")
        time.sleep(chance.uniform(0.5, 2.0))
        live.unlink()
        away.rename(live)
    return what


@pytest.mark.parametrize("strikes", [3, pytest.param(20, marks=pytest.mark.long)])
def test_nothing_promised_is_lost_and_nothing_is_trained_on_twice(tmp_path, strikes):
    run, chance = LiveRun(tmp_path), random.Random(strikes)
    users = Users(run)
    try:
        run.start("run")
        until(lambda: newest_version(run.bucket) is not None, "no version 0")
        run.grant("gateway", "gateway")
        run.grant("worker-live", "live")
        run.make_secret()
        for name in ("replica", "gateway", "learner"):
            run.start(name)
        until(run.is_ready, "the gateway is not ready")
        users.start()
        until(lambda: newest_version(run.bucket) >= 1, "nothing was trained")
        struck = Counter()
        for _ in range(strikes):
            served = len(users.taken)
            struck[strike(run, chance)] += 1
            until(lambda served=served: len(users.taken) > served + 8, "users are not served")
        trained = newest_version(run.bucket)
        until(lambda: newest_version(run.bucket) > trained, "training does not go on")
        users.stopping.set()
        users.join(150)
        spool = tmp_path / "state"
        until(lambda: not any(spool.rglob("*.rows")), "the spool is not uploaded")
    finally:
        users.stopping.set()
        if users.ident is not None:
            users.join(150)
        run.stop()
    assert struck.total() == strikes
    check(run, users)


def check(run, users):
    """Compare the bucket with what users were promised."""
    described = read_run(run.bucket, public_key=run.owner)
    bucket = SignedBucket(run.bucket, pin=Pin(run.owner, described.id))
    records = LiveRecords(bucket)
    records.poll()
    stored = {name for about in records.reports.values() for _, name in about}
    assert not users.promised - records.answers.keys()
    assert not users.taken - stored
    claimed = Counter(one.answer for line in read_lineages(bucket) for one in line.answers)
    assert claimed
    assert set(claimed.values()) == {1}
    consumed = Counter()
    for version in range(1, newest_version(run.bucket) + 1):
        manifest = read_manifest(run.bucket, described, version)
        step = CommitMetadata.of(manifest.metadata, run="", version=version)
        consumed.update((worker, number) for worker, number in step.consumed)
    assert consumed
    assert set(consumed.values()) == {1}

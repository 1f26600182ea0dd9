"""A running run is moved to the next release and back, one process after another.

Two builds take part: a copy of the one that is tested, so that edits during the drill do not reach
it, and one with the number and a feature of the next release (`two_builds`). Nothing is lost or
done twice, and every follower goes on.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tiny_config
from two_builds import NEXT, Forked, ForkServer, command_of, make_build

from deltawire import __version__, codec
from deltawire.dashboard.status import Watch, builds_in
from deltawire.launch.live_secret import SecretPlace, create_secret
from deltawire.rl.evaluate.audit import audit_fates
from deltawire.rl.trainer.verify_training import verify_training
from deltawire.runtime.fleet import read_trainer
from deltawire.runtime.heartbeat import read_heartbeat
from deltawire.store import open_bucket
from deltawire.sync import find_run, load_mirror, newest_version, read_manifest, read_run

pytestmark = [pytest.mark.drills, pytest.mark.long, pytest.mark.timeout(7200)]

PATIENCE_S = 600.0
NUMBERS = re.compile(r" on http://127\.0\.0\.1:(\d+)")
TOKENS = {
    "DELTAWIRE_TOKEN": "t", "DELTAWIRE_ADMIN_TOKEN": "a", "DELTAWIRE_REPLICA_KEY": "k",
    "OMP_NUM_THREADS": "1",
}  # fmt: skip
THIS = __version__
CONFIG = tiny_config.endless("upgraded", checkpoint_every=4, anchor_every=5, evaluate_every=1)


class Fleet:
    """The processes of one run, each of the build that it was last started with."""

    def __init__(self, folder: Path, builds: dict[str, Path], servers: dict[str, Any]) -> None:
        self.folder = folder
        self.builds = builds
        self.servers = servers
        self.bucket = open_bucket(str(folder / "bucket"), create=True)
        self.copy = open_bucket(str(folder / "copy"), create=True)
        self.started: dict[str, Forked] = {}
        self.began = time.monotonic()
        (folder / "run.toml").write_text(CONFIG)

    def arguments(self, name: str) -> list[str]:
        url = self.bucket.url
        if name == "trainer":
            config, model = str(self.folder / "run.toml"), str(self.folder / "model")
            return ["trainer", url, "--config", config, "--model", model]
        if name == "evaluator":
            return ["evaluator", url]
        if name == "relay":
            return ["relay", url, self.copy.url, "--follow", "--json"]
        if name == "pull":
            return ["pull", url, str(self.folder / "pulled"), "--follow", "--json"]
        if name == "replica":
            return ["replica", url, "--port", "0"]
        if name == "gateway":
            replica = f"http://127.0.0.1:{self.port('replica')}"
            state, secret = str(self.folder / "state"), str(self.folder / "live.secret")
            words = ["gateway", url, "--port", "0", "--replica", replica, "--state", state]
            return [*words, "--secret", secret, "--capture-header"]
        return ["worker", url, "--id", name]

    def say(self, what: str) -> None:
        """Shows where the time goes, with ``pytest -s``."""
        sys.stdout.write(f"{time.monotonic() - self.began:6.1f} s {what}\n")
        sys.stdout.flush()

    def start(self, name: str, build: str) -> None:
        log = self.folder / f"{name}.log"
        log.write_bytes(b"")
        self.started[name] = self.servers[build].start(
            self.arguments(name), log=log, cwd=self.folder, env=TOKENS, within_s=PATIENCE_S
        )

    def stop(self, name: str) -> None:
        process = self.started.pop(name)
        process.send_signal(signal.SIGTERM)
        # A relay and a pull end by the signal: they hold nothing that is not stored.
        assert process.wait(PATIENCE_S) in (0, 130, -signal.SIGTERM), self.printed(name)

    def printed(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")[-4000:]

    def port(self, name: str) -> int:
        self.until(lambda: NUMBERS.search(self.printed(name)) is not None, name)
        return int(NUMBERS.findall(self.printed(name))[-1])

    def until(self, condition, what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            for name, process in self.started.items():
                assert process.poll() is None, f"{name} ended: {self.printed(name)}"
            assert time.monotonic() < deadline, f"{what}: waited too long"
            time.sleep(0.1)

    def version(self) -> int:
        return -1 if (found := newest_version(self.bucket)) is None else found

    def versions_more(self, number: int) -> None:
        wanted = self.version() + number
        self.until(lambda: self.version() >= wanted, f"version {wanted}")

    def goes_on(self, name: str) -> None:
        """Waits until a process of the build that was started last has done something."""
        if name == "trainer":
            self.versions_more(1)
        elif name == "relay":
            wanted = self.version()
            self.until(lambda: (newest_version(self.copy) or 0) >= wanted, "the relay")
        elif name == "pull":
            wanted = self.version()
            self.until(lambda: self.pulled() >= wanted, "the directory")
        elif name in ("replica", "gateway"):
            if name == "gateway":
                self.until(lambda: " ready" in self.printed("gateway"), "a ready replica")
                assert self.ask()
        else:
            self.until(lambda: self.finished(name) > 0, f"work of {name}")

    def finished(self, name: str) -> int:
        """How many groups or evaluations the present process of a name has finished."""
        heartbeat = read_heartbeat(self.bucket, name)
        ours = heartbeat is not None and heartbeat.pid == self.started[name].pid
        return heartbeat.finished if ours else 0

    def pulled(self) -> int:
        """The version that the directory shows: the last that the command reported."""
        found = re.findall(r'"version": ?(\d+)', self.printed("pull"))
        return int(found[-1]) if found else -1

    def ask(self) -> str:
        body = {"model": "upgraded", "messages": [{"role": "user", "content": "abc"}]}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port('gateway')}/v1/chat/completions",
            data=json.dumps({**body, "max_tokens": 4}).encode(),
            headers={"authorization": "Bearer t", "content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return json.loads(answer.read())["id"]

    def close(self) -> None:
        for process in self.started.values():
            process.kill()
            process.wait(PATIENCE_S)


ORDER = ["w0", "w1", "evaluator", "relay", "pull", "replica", "gateway", "trainer"]


@pytest.fixture(scope="module")
def builds(tmp_path_factory) -> dict[str, Path]:
    return {
        name: make_build(tmp_path_factory.mktemp(name), edited=name == "next")
        for name in ("this", "next")
    }


@pytest.fixture(scope="module")
def servers(builds) -> Iterator[dict[str, ForkServer]]:
    with ForkServer(builds["this"]) as this, ForkServer(builds["next"]) as following:
        yield {"this": this, "next": following}


@pytest.fixture
def fleet(tmp_path, builds, servers):
    found = Fleet(tmp_path, builds, servers)
    yield found
    found.close()


def make_model(fleet: Fleet, build: str) -> None:
    words = ["warm-start", str(fleet.folder / "run.toml"), "--out", str(fleet.folder / "model")]
    subprocess.run([*command_of(fleet.builds[build]), *words], check=True, timeout=PATIENCE_S)


def begin(fleet: Fleet, build: str) -> None:
    """Starts every process of the run with one build."""
    make_model(fleet, build)
    fleet.start("trainer", build)
    fleet.until(lambda: fleet.version() >= 0, "version 0")
    create_secret(fleet.bucket, read_run(fleet.bucket), SecretPlace(fleet.folder / "live.secret"))
    for name in ORDER[:-1]:
        fleet.start(name, build)
    for name in ORDER:
        fleet.goes_on(name)
        fleet.say(f"{name} goes on, version {fleet.version()}")


def move(fleet: Fleet, build: str, name_of: dict[str, str]) -> None:
    """Replaces one process after another by one of another build; each goes on before the next."""
    for name in ORDER:
        fleet.stop(name)
        fleet.say(f"{name} stopped")
        fleet.start(name, build)
        fleet.goes_on(name)
        fleet.say(f"{name} goes on as {name_of[build]}, version {fleet.version()}")
        if name == "w0":
            shown = builds_in(Watch(fleet.bucket).poll().processes)
            assert sorted(shown) == sorted(name_of.values())
            assert shown[name_of[build]] == ["w0"]
    for name in ("trainer", "w0", "w1", "evaluator"):
        heartbeat = read_heartbeat(fleet.bucket, name)
        assert heartbeat is not None
        assert heartbeat.build == name_of[build]


@pytest.mark.parametrize(("first", "second"), [("this", "next"), ("next", "this")])
def test_a_run_is_upgraded_and_moved_back(fleet, first, second):
    """With ``next`` first, the run itself was created by the next release."""
    name_of = {"this": THIS, "next": NEXT}
    begin(fleet, first)
    move(fleet, second, name_of)
    move(fleet, first, name_of)
    for name in ("w0", "w1", "evaluator", "trainer"):
        fleet.stop(name)
    newest = fleet.version()
    fleet.goes_on("relay")
    fleet.goes_on("pull")
    fleet.close()
    fleet.say(f"all stopped at version {newest}")
    fleet.started.clear()
    status = read_trainer(fleet.bucket)
    assert (status.phase, status.version) == ("stopped", newest)
    run = read_run(fleet.bucket)
    assert run.build == name_of[first]
    written = [read_manifest(fleet.bucket, run, version).build for version in range(newest + 1)]
    periods = [
        written[0],
        *(two for one, two in pairwise(written) if one != two),
    ]
    assert periods == [name_of[first], name_of[second], name_of[first]]
    fates = audit_fates(fleet.bucket, max_staleness=2)
    assert fates.consumed == 4 * newest
    assert (fates.twice, fates.forgotten) == ([], [])
    fleet.say("audited")
    replayed = verify_training(fleet.bucket)
    assert replayed.exact, f"version {replayed.differs}: {replayed.reason}"
    assert replayed.last == newest
    fleet.say("replayed")
    digest = read_manifest(fleet.bucket, run, newest).digest
    for bucket in (fleet.bucket, fleet.copy):
        held = load_mirror(bucket, find_run(bucket), at=newest)
        assert codec.digest_model(held.tensors).hex() == digest
    verified = [
        *command_of(fleet.builds["this"]),
        "pull",
        fleet.bucket.url,
        str(fleet.folder / "pulled"),
    ]
    subprocess.run([*verified, "--verify"], check=True, timeout=PATIENCE_S)


def test_a_worker_that_lacks_a_feature_says_so(fleet):
    path = fleet.folder / "run.toml"
    path.write_text(CONFIG.replace("workers = 2", "workers = 2\ntempo = 3"))
    make_model(fleet, "next")
    fleet.start("trainer", "next")
    fleet.until(lambda: fleet.version() >= 0, "version 0")
    for role, *options in (("worker", "--id", "old"), ("trainer",)):
        words = [*command_of(fleet.builds["this"]), role, fleet.bucket.url, *options]
        ended = subprocess.run(
            words, check=False, capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert ended.returncode == 2, ended.stderr
        said = f"this run needs deltawire 0.2 for rollout.tempo; this {role} is {THIS}"
        assert said in ended.stderr
    fleet.start("w0", "next")
    fleet.start("evaluator", "this")
    fleet.versions_more(2)
    shown = builds_in(Watch(fleet.bucket).poll().processes)
    assert shown == {THIS: ["evaluator"], NEXT: ["trainer", "w0"]}

"""A signed run with one malicious worker, and a writer in the bucket who has no key.

    python tests/support/malicious.py --seconds 1800 --chaos

Processes are real: the run's trainer and workers, and three honest workers that are odd: one on a
slow link, one that gets each version late, and one with another precision. The malicious worker is
a thread of this program. It has the key that the owner granted to its name. It forges rewards,
tokens and log-probabilities in groups that it was granted, makes some of them huge or damaged,
floods numbers that it was not granted, writes under other workers' names, signed with its own key
or not at all, and under a name that has a key and is not allowed. The scribbler has no key and
writes junk wherever an object could be. With ``--chaos`` the run is on S3 over a bad network, and
its processes are killed and stopped at random.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from chaos import CONFIG, RATES, SCRIPT, Chaos
from rich.console import Console

from deltawire.chat.text import Text
from deltawire.config import load_config
from deltawire.dashboard.status import Watch
from deltawire.envs import open_tasks
from deltawire.errors import DeltawireError
from deltawire.events import Attempt, Life, Step, encode_lines
from deltawire.launch.role_keys import RunKeys
from deltawire.launch.session import Job, execute
from deltawire.rl.control.challenges import nonce_of, read_challenge, stream_of
from deltawire.rl.control.rollout_reader import read_group
from deltawire.rl.evaluate.audit import all_metadata, audit_consumption, audit_fates
from deltawire.runtime.event_tail import EventTail
from deltawire.runtime.fleet import read_trainer
from deltawire.runtime.signed_bucket import SignedBucket
from deltawire.runtime.trusted import ReaderTrust, trusted
from deltawire.store import Bucket, open_bucket
from deltawire.sync import newest_version
from deltawire.testing.proxy import FaultyProxy
from deltawire.testing.s3_server import S3Server
from deltawire.train.build import byte_tokenizer
from deltawire.wire import keys
from deltawire.wire.objects import encode_json
from deltawire.wire.roles import SUPERVISOR_ROLE, sign_bytes, worker_role
from deltawire.wire.rollouts import MAX_GROUP_BYTES, Group, Trajectory, encode_group
from deltawire.wire.seal import Signer
from deltawire.wire.signing import Ed25519Signer
from deltawire.wire.status import Heartbeat, WorkerStatus

EVIL, INTRUDER = "evil", "intruder"
FORGED = "killed by nobody"
FOLDER = Path(__file__).parent
WORKERS = """
[workers]
allow = ["w0", "w1", "slow", "late", "other", "evil"]
[trust]
rescore_share = SHARE
"""


@dataclass
class Findings:
    """The objects that are left in the bucket afterwards."""

    versions: int = 0
    quarantined: dict[str, str] = field(default_factory=dict)
    quarantined_after_s: float = -1.0
    evil_read: int = 0
    """Groups of the malicious worker that the trainer read, all of them forged."""
    evil_consumed: int = 0
    evil_consumed_later: int = 0
    """By steps after its quarantine."""
    largest_share: float = 0.0
    """The malicious worker's largest share of one step's groups, once others have delivered."""
    honest_consumed: Counter[str] = field(default_factory=Counter)
    honest_forgotten: list[str] = field(default_factory=list)
    """Groups that no version settled although it was time, each with what is in its place."""
    twice: int = 0
    lost: int = 0
    incidents: dict[str, dict[str, int]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    forged_events: int = 0
    """Events of the malicious worker in the trainer's name that a reader believes."""
    attempts: Counter[str] = field(default_factory=Counter)
    strikes: Counter[str] = field(default_factory=Counter)


class Actor(threading.Thread):
    """Does something now and then until it is closed; errors of the store are ignored."""

    def __init__(self, bucket: Bucket, every_s: float) -> None:
        super().__init__(daemon=True)
        self.bucket = bucket
        self.attempts: Counter[str] = Counter()
        self._every_s = every_s
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(self._every_s):
            with suppress(DeltawireError):
                self.act()

    def act(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self._over.set()
        if self.is_alive():
            self.join(60)


class MaliciousWorker(Actor):
    """Lies in the groups that it was granted, and writes wherever it can.

    ``bucket`` is the store as it is; ``signers`` are its own key, and that of a name that the run
    does not allow.
    """

    def __init__(
        self, bucket: Bucket, keys_of: RunKeys, signers: dict[str, Signer], config
    ) -> None:
        super().__init__(bucket, 0.2)
        self.config = config
        self.run_id, self.signer = keys_of.pin.run_id, signers[EVIL]
        self.signing = {
            name: SignedBucket(bucket, pin=keys_of.pin, signer=signer, role=worker_role(name))
            for name, signer in signers.items()
        }
        self.own = self.signing[EVIL]
        self.tasks = open_tasks(config.task, seed=config.seed)
        self.text = Text(byte_tokenizer())
        self.stored = 0
        self.number = 0
        self.rng = random.Random(7)
        self.flooded = 0

    def act(self) -> None:
        self.number += 1
        self.beat(EVIL)
        status = read_trainer(self.own)
        if status is None:
            return
        secret = read_challenge(self.own, EVIL)
        if secret and self.stored < status.credits.get(EVIL, 0):
            kind, data = self.next_group(status.version, secret)
            self.own.create(keys.rollout(EVIL, self.stored), data)
            self.stored += 1
            self.attempts[kind] += 1
        if self.number % 5 == 0:
            self.write_elsewhere(status, secret or "00" * 16)

    def next_group(self, version: int, secret: str) -> tuple[str, bytes]:
        """A forged group; every eighth is larger than readers accept, and every eighth damaged:
        too few to be quarantined for those."""
        data = encode_group(self.forged(EVIL, self.stored, version, secret))
        if self.stored % 8 == 3:
            return "damaged", data[:-9]
        if self.stored == 5:
            return "huge", bytes(MAX_GROUP_BYTES + 4096)
        if self.stored % 8 == 5:
            return "huge", data + bytes(1 << 22)
        return "forged", data

    def write_elsewhere(self, status, secret: str) -> None:
        beyond = status.credits.get(EVIL, 0) + 10_000 + self.flooded
        for sequence in range(beyond, beyond + 5):
            group = self.forged(EVIL, sequence, status.version, secret)
            self.own.create(keys.rollout(EVIL, sequence), encode_group(group))
        self.own.create(keys.rollout(EVIL, beyond + 5), secrets.token_bytes(1 << 20))
        self.forge_events(self.flooded)
        self.flooded += 6
        self.attempts["not granted"] += 6
        victim = "w0"
        beat = (self.bucket.get(keys.heartbeat(victim), limit=1 << 20) or b"{}").split(b"\n")[0]
        at = (json.loads(beat).get("worker") or {}).get("stored", 0)
        data = encode_group(self.forged(victim, at, status.version, secret))
        data = data if self.number % 2 else data[:-9]
        signs = self.number % 4 < 2
        self.attempts["as another"] += self.store_as(victim, at, data, signs=signs)
        self.beat(INTRUDER)
        group = self.forged(INTRUDER, self.number, status.version, secret)
        self.signing[INTRUDER].create(keys.rollout(INTRUDER, self.number), encode_group(group))
        self.attempts["not allowed"] += 1

    def forge_events(self, number: int) -> None:
        """Report steps in the trainer's name: in its own stream, and in one of the trainer's."""
        life = Life(process="trainer", at=time.time(), role="trainer", what="died", detail=FORGED)
        data = encode_lines([life])
        self.own.create(keys.events(f"{EVIL}-ffff", number), data)
        self.bucket.create(keys.events("trainer-ffff", number), data)
        self.attempts["events as the trainer"] += 2

    def store_as(self, victim: str, at: int, data: bytes, *, signs: bool) -> bool:
        """Store a group in another worker's name, signed with its own key, or not at all."""
        key = keys.rollout(victim, at)
        if signs:
            role = worker_role(victim)
            data = sign_bytes(data, run_id=self.run_id, key=key, signer=self.signer, role=role)
        return self.bucket.create(key, data)

    def beat(self, name: str) -> None:
        worker = WorkerStatus(phase="sampling", version=0, digest="0" * 32, stored=self.stored)
        heartbeat = Heartbeat(
            process=name, role="worker", nonce="evil", lease=0, supervised=False,
            host=socket.gethostname(), pid=0, started_at=0.0, at=time.time(), number=self.number,
            doing="sample", quiet_s=0.0, allowed_s=60.0, worker=worker,
        )  # fmt: skip
        self.signing[name].put(keys.heartbeat(name), encode_json(heartbeat))

    def forged(self, name: str, number: int, version: int, secret: str) -> Group:
        """Random answers to the right task, half of them rewarded, almost certain to be drawn."""
        task = self.tasks.draw(stream_of(name, secret, 0), number)
        messages = asyncio.run(self.tasks.open(task).reset()).messages
        count = self.config.rollout.max_tokens
        trajectories = [
            Trajectory(
                np.array([self.rng.randrange(97, 123) for _ in range(count)], np.int32),
                np.full(count, -0.01, np.float32),
                np.full(count, version, np.int32),
                np.ones(count, np.uint8),
                float(place % 2),
                "length",
            )
            for place in range(self.config.rollout.group_size)
        ]
        prompt = np.array(self.text.prompt(messages), np.int32)
        nonce = nonce_of(secret, 0, number)
        return Group(name, nonce, task.identity, 1.0, prompt, trajectories, task.family)


class Scribbler(Actor):
    """Writes junk: it may write to the bucket, and has no key and no name."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(bucket, 1.0)
        self.rng = random.Random(11)

    def act(self) -> None:
        junk = self.rng.randbytes(self.rng.choice((0, 7, 4000)))
        newest = newest_version(self.bucket) or 0
        if self.attempts["junk"] % 60 == 20:  # The trainer starts again for each of these.
            ahead = keys.manifest(newest + 2)
            self.attempts["junk as a version"] += self.bucket.create(ahead, junk)
        places = (
            keys.blob(self.rng.randbytes(32).hex()),
            keys.compacted(newest, newest + 9),
            keys.retention_floor(newest + 3),
            keys.heartbeat("w1"),
            keys.heartbeat("nobody"),
            keys.events("w1-junk", self.rng.randrange(5)),
            f"rollouts/{'x' * 70}/junk",
        )
        key = self.rng.choice(places)
        if key == keys.heartbeat("w1"):
            self.bucket.put(key, junk)
        else:
            self.bucket.create(key, junk)
        self.attempts["junk"] += 1


class Director(threading.Thread):
    """Starts the actors once there is a version, and asks the run to stop when it is over."""

    def __init__(self, bucket: Bucket, actors, seconds: float, enough) -> None:
        super().__init__(daemon=True)
        self._bucket, self._actors = bucket, actors
        self._seconds, self._enough = seconds, enough
        self._over = threading.Event()

    def run(self) -> None:
        while newest_version(self._bucket) is None:
            if self._over.wait(0.2):
                return
        for actor in self._actors:
            actor.start()
        end = time.monotonic() + self._seconds
        while time.monotonic() < end and not self._enough():
            if self._over.wait(0.5):
                return
        os.kill(os.getpid(), signal.SIGINT)

    def close(self) -> None:
        self._over.set()
        self.join(60)


class OddWorker(Actor):
    """An honest worker in a separate process that is started again if it ends."""

    def __init__(
        self, bucket: Bucket, url: str, script: str, name: str, *arguments: str, signs: list[str]
    ) -> None:
        super().__init__(bucket, 2.0)
        self._command = [sys.executable, str(FOLDER / script), url, name, *arguments, *signs]
        self._process: subprocess.Popen[bytes] | None = None

    def act(self) -> None:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )

    def close(self) -> None:
        super().close()
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


@contextmanager
def store_of(folder: Path, *, chaos: bool) -> Iterator[tuple[str, Bucket, Bucket, Any]]:
    """Yields URL, the run's bucket, a bucket without faults, and the network that makes them."""
    if not chaos:
        url = str(folder / "bucket")
        yield url, open_bucket(url, create=True), open_bucket(url), None
        return
    with S3Server("ministack") as server:
        server.make_bucket("drills")
        with FaultyProxy(server.endpoint, seed=1, rates=RATES, mercy=4) as proxy:
            os.environ.update(server.environment)
            os.environ["AWS_ENDPOINT_URL"] = proxy.endpoint
            url = "s3://drills/run"
            proxy.choose = lambda *_: None
            yield url, open_bucket(url), server.open(url), proxy


def attack(
    folder: Path, *, seconds: float, share: float = 0.1, chaos: bool = False, after: int = 0
) -> Findings:
    """Run it for so long, or until ``after`` versions follow the quarantine (0: never)."""
    path = folder / "attacked.toml"
    path.write_text(CONFIG + WORKERS.replace("SHARE", str(share)))
    config = load_config(path)
    found, console = Findings(), Console(file=(folder / "run.log").open("w"))
    owner = folder / "owner.key"
    Ed25519Signer.generate().write(owner)
    with store_of(folder, chaos=chaos) as (url, bucket, raw, proxy):
        signs = RunKeys(bucket, owner, folder / "out" / "keys")
        watched = trusted(
            bucket,
            ReaderTrust(signs.pin),
            signer=signs.signer(SUPERVISOR_ROLE),
            role=SUPERVISOR_ROLE,
        )
        command = (sys.executable, str(SCRIPT))
        job = Job(config, path, None, folder / "out", watched, command=command, keys=signs)
        signers = {name: signs.signer(worker_role(name)) for name in (EVIL, INTRUDER)}
        evil, scribbler = MaliciousWorker(raw, signs, signers, config), Scribbler(raw)
        odd = (
            ("slow_worker.py", "slow", "0.05"),
            ("late_worker.py", "late"),
            ("other_precision.py", "other"),
        )
        actors: list[Actor] = [evil, scribbler]
        for script, name, *arguments in odd:
            own = signs.arguments(worker_role(name))
            actors.append(OddWorker(raw, url, script, name, *arguments, signs=own))
        direct = SignedBucket(raw, pin=signs.pin)
        caught: list[tuple[float, int]] = []
        began = time.monotonic()

        def enough() -> bool:
            with suppress(DeltawireError):
                status = read_trainer(direct)
                if status and any(i.quarantined and i.worker == EVIL for i in status.incidents):
                    caught.append((time.monotonic() - began, status.version))
                    return bool(after) and status.version >= caught[0][1] + after
            return False

        director = Director(direct, actors, seconds, enough)
        striking = None
        if proxy is not None:
            striking = Chaos(direct, proxy, seed=1, seconds=10 * seconds, strikes=1_000_000)
            striking.start()
            proxy.choose = proxy.draw
        director.start()
        try:
            execute(job, console, plain=True)
        finally:
            if striking is not None:
                striking.close()
                found.strikes = striking.strikes
            director.close()
            for actor in actors:
                actor.close()
        found.quarantined_after_s = caught[0][0] if caught else -1.0
        found.attempts = evil.attempts + scribbler.attempts
        _audit(found, direct, config.train.max_staleness)
    console.file.close()
    return found


def _audit(found: Findings, bucket: Bucket, max_staleness: int) -> None:
    status = Watch(bucket).poll()
    found.problems = status.problems
    for one in status.incidents:
        found.incidents.setdefault(one.worker, {})[one.kind] = one.count
        if one.quarantined:
            found.quarantined[one.worker] = one.detail
    for version, metadata in all_metadata(bucket):
        found.versions = version
        workers = Counter(worker for worker, _ in metadata.consumed)
        found.evil_consumed += workers[EVIL]
        dropped = sum(worker == EVIL for worker, _ in metadata.dropped_groups())
        found.evil_read += workers[EVIL] + dropped
        share = workers.pop(EVIL, 0) / len(metadata.consumed)
        # Until the others deliver there is nobody else to make a step, and the quota gives way.
        if len(found.honest_consumed) > 1:
            found.largest_share = max(found.largest_share, share)
        found.honest_consumed += workers
    events = EventTail(bucket).read(everything=True)
    found.forged_events = sum(isinstance(e, Life) and e.detail == FORGED for e in events)
    caught = [e.at for e in events if isinstance(e, Attempt) and e.quarantined and e.worker == EVIL]
    if caught:
        later = [e for e in events if isinstance(e, Step) and e.at > min(caught)]
        found.evil_consumed_later = sum(step.workers.get(EVIL, 0) for step in later)
    fates = audit_fates(bucket, max_staleness=max_staleness)
    foreign = {EVIL, INTRUDER}
    for worker, sequence in fates.forgotten:
        if worker not in foreign:
            found.honest_forgotten.append(
                f"{worker}/{sequence}: {_stored(bucket, worker, sequence)}"
            )
    consumption = audit_consumption(bucket)
    found.twice, found.lost = consumption.repeated + len(fates.twice), consumption.lost


def _stored(bucket: Bucket, worker: str, sequence: int) -> str:
    try:
        group = read_group(bucket, worker, sequence)
    except DeltawireError as error:
        return error.message
    return f"of versions {group[0].oldest_version} to {group[0].newest_version}" if group else ""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--share", type=float, default=0.1)
    parser.add_argument("--after", type=int, default=0)
    parser.add_argument("--chaos", action="store_true")
    parser.add_argument("--folder", default="")
    arguments = parser.parse_args()
    folder = Path(arguments.folder or tempfile.mkdtemp(prefix="malicious-"))
    folder.mkdir(parents=True, exist_ok=True)
    found = attack(
        folder,
        seconds=arguments.seconds,
        share=arguments.share,
        chaos=arguments.chaos,
        after=arguments.after,
    )
    sys.stdout.write(json.dumps(msgspec.to_builtins(vars(found)), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

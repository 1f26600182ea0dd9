"""``captures_lost``, ``feedback_lost`` and ``feedback_trained_twice``: what crashes cost.

The gateway, as the command runs it, is killed by SIGKILL `SEEDS` times while clients ask and
report, in every second life with an outage of the bucket. Receipts and answers to feedback tell
clients that something is stored; the bucket is compared with that. Then a learner makes groups of
these answers, and dies before or after random writes; answers in two lineages are counted. The
trainer's consumption of groups has the drills of `deltawire run`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.live.replica import ADMIN, TOKEN, MeasuredProcess
from benchmarks.training.keys import Measured, Options
from deltawire.config import parse_config
from deltawire.errors import RetryError
from deltawire.launch.live_secret import SecretPlace, create_secret
from deltawire.live.feedback.client import receipt_of
from deltawire.live.learning.grouping import GroupMaker
from deltawire.live.learning.learner import LiveGroups
from deltawire.live.learning.records import LiveRecords
from deltawire.rl.control.lineages import read_lineages
from deltawire.store import Bucket, DelegatingBucket, open_bucket
from deltawire.sync import read_manifest
from deltawire.testing.tiny import start_publisher, start_run, weights
from deltawire.wire import keys
from deltawire.wire.receipts import read_receipt

SEEDS = 20
CLIENTS = 4
LEARNER = {
    "name": "drill",
    "rollout": {"group_size": 4, "max_tokens": 64},
    "train": {"loss": {"advantage": "given"}},
    "trust": {"rescore_share": 0.0},
    "live": {"settle_s": 1.0, "user_cap": 0.5},
}


async def _client(url: str, told: dict[str, set[str]], number: itertools.count[int]) -> None:
    """Ask and report until the gateway is gone; note what it says is stored."""
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
        while True:
            place = next(number)
            body = {
                "model": "m", "stream": True, "user": f"user {place}",
                "messages": [{"role": "user", "content": f"question {place}"}],
            }  # fmt: skip
            async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
                events = (await answer.read()).decode().split("\n\n")
            last = json.loads(events[-3].removeprefix("data: "))
            receipt = receipt_of(last)
            told["receipts"].add(receipt)
            report = {"receipt": receipt, "kind": "accept", "value": place % 2, "id": f"r{place}"}
            async with session.post(f"{url}/v1/feedback", json=report) as answer:
                if answer.status == 200:
                    told["reports"].add((await answer.json())["id"])


async def _life(process: MeasuredProcess, told: dict[str, set[str]], life_s: float) -> None:
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{process.url}/health") as health:
                if health.status == 200:
                    break
            await asyncio.sleep(0.05)
    number = itertools.count(len(told["receipts"]) * 10)
    clients = [asyncio.create_task(_client(process.url, told, number)) for _ in range(CLIENTS)]
    await asyncio.sleep(life_s)
    process.process.kill()
    await asyncio.gather(*clients, return_exceptions=True)


def _gateways(folder: Path, options: Options) -> tuple[Bucket, dict[str, set[str]]]:
    """Run and kill gateways; returns the bucket, and what they said is stored."""
    bucket = open_bucket(str(folder / "run"), create=True)
    publisher = start_publisher(bucket)
    publisher.publish(weights(0))
    publisher.close()
    manifest = read_manifest(bucket, start_run(bucket), 0)
    assert manifest is not None
    create_secret(bucket, start_run(bucket), SecretPlace(folder / "secret"))
    replica = MeasuredProcess(
        [sys.executable, "-m", "benchmarks.live.replica", "replica", manifest.digest], 0
    )

    def gateway() -> MeasuredProcess:
        command = [sys.executable, "-m", "deltawire", "gateway", bucket.url, "--port", "0"]
        command += ["--replica", replica.url, "--capture-share", "1"]
        command += ["--state", str(folder / "state"), "--secret", str(folder / "secret")]
        return MeasuredProcess(command, 1, DELTAWIRE_TOKEN=TOKEN, DELTAWIRE_ADMIN_TOKEN=ADMIN)

    told: dict[str, set[str]] = {"receipts": set(), "reports": set()}
    live, away = folder / "run" / "live", folder / "away"
    chance = random.Random(options.seed)
    try:
        for seed in range(SEEDS):
            process = gateway()
            if outage := seed % 2 == 1 and live.exists():
                live.rename(away)
                live.write_text("not a folder: every write below it fails")
            asyncio.run(_life(process, told, chance.uniform(0.3, 1.5)))
            process.stop()
            if outage:
                live.unlink()
                away.rename(live)
        last = gateway()
        spool = folder / "state"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and (
            any(spool.rglob("*.rows")) or any(spool.rglob("*.open"))
        ):
            time.sleep(0.1)
        last.stop()
    finally:
        replica.stop()
    return bucket, told


class _DyingBucket(DelegatingBucket):
    """Fails before or after random writes, as if the process had ended there."""

    def __init__(self, inner: Bucket, seed: int) -> None:
        super().__init__(inner)
        self._chance = random.Random(seed)

    def create(self, key: str, data: bytes) -> bool:
        fault = self._chance.random()
        if fault < 0.2:
            raise RetryError("planted", run=self.url, key=key)
        made = super().create(key, data)
        if fault > 0.8:
            raise RetryError("planted after the write", run=self.url, key=key)
        return made


def _learn(bucket: Bucket, seed: int) -> None:
    """One life of a learner, until it dies or no answer is left."""
    records = LiveRecords(bucket)
    records.poll()
    stored = [found[1] + 1 for key in bucket.list(keys.rollouts_of("live"))
              if (found := keys.group_of(key)) is not None]  # fmt: skip
    maker = GroupMaker(parse_config(LEARNER, source="drill"), records)
    groups = LiveGroups(_DyingBucket(bucket, seed), "live", maker, first=max(stored, default=0))
    for number in itertools.count():
        if not groups.store(f"{seed}-{number}", time.time() + 10):
            return


def measure(options: Options) -> Measured:
    """Measure all three keys."""
    with tempfile.TemporaryDirectory(prefix="deltawire-bench-") as name:
        folder = Path(name)
        bucket, told = _gateways(folder, options)
        run = start_run(bucket)
        secret = SecretPlace(folder / "secret").read(bucket, run)
        receipts = [
            read_receipt(text, keys=secret.receipt_keys, run=run.id) for text in told["receipts"]
        ]
        promised = {one.answer for one in receipts if one is not None and one.recorded}
        records = LiveRecords(bucket)
        records.poll()
        ids = {name for about in records.reports.values() for name in about}
        lives = 0
        while lives < 10_000:
            lives += 1
            try:
                _learn(bucket, options.seed + lives)
                break
            except RetryError:
                continue
        claimed = Counter(one.answer for line in read_lineages(bucket) for one in line.answers)
        values: dict[str, bool | float] = {
            "captures_lost": len(promised - records.answers.keys()),
            "feedback_lost": len(told["reports"] - ids),
            "feedback_trained_twice": sum(count - 1 for count in claimed.values()),
        }
        details: dict[str, Any] = {
            "gateways_killed": SEEDS,
            "answers_promised": len(promised),
            "answers_unrecorded": len(receipts) - len(promised),
            "reports_taken": len(told["reports"]),
            "learners_killed": lives - 1,
            "answers_trained": len(claimed),
        }
        return Measured(values, details)

"""Two thousand simulated users for minutes, at two gateways over three replicas, while a gateway is
killed, a replica hangs, another one lies, the bucket is away, and the secret is rotated.

Gateways are processes by their command; replicas are stand-ins that state tokens as vLLM does.
Afterwards each answer that a receipt calls stored is stored once, each report that was taken is
stored, no user was in two arms, and one user is forgotten entirely.
"""

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest
from blake3 import blake3
from live_decider import Decider, until
from live_gateway import TokenReplica, published, write_secret

from benchmarks.ports import free_port
from deltawire.live.deployment_secret import parse_secret
from deltawire.live.erasure.stored_rows import require_rows
from deltawire.live.learning.records import LiveRecords
from deltawire.runtime.compacted_segments import (
    compacted_owners,
    list_compacted,
    require_compacted,
    stored_owners,
)
from deltawire.sync import read_run
from deltawire.wire import keys
from deltawire.wire.captures import Capture, decode_rows
from deltawire.wire.receipts import ReceiptKeys, read_receipt

pytestmark = [pytest.mark.drills, pytest.mark.long, pytest.mark.timeout(900)]

USERS = int(os.environ.get("DELTAWIRE_DRILL_USERS", "2000"))
SECONDS = float(os.environ.get("DELTAWIRE_DRILL_SECONDS", "180"))
TURNS = (1, 2, 3)
AWAY_S = 20.0
MOST_MEMORY = 256 << 20
"""Bytes that a gateway may hold in memory."""
PER_MINUTE = 30
"""Reports of one user in a minute; the flood sends more."""
TOKENS = {
    "DELTAWIRE_TOKEN": "sampling", "DELTAWIRE_ADMIN_TOKEN": "admin",
    "DELTAWIRE_REPLICA_KEY": "upstream", "OMP_NUM_THREADS": "1",
}  # fmt: skip


class Deployment:
    """Two gateways over three replicas, and what users were promised."""

    def __init__(self, folder):
        self.folder, self.location = folder, folder / "bucket"
        self.bucket = published(versions=3, url=str(self.location))
        self.run = read_run(self.bucket)
        self.secret = Path(write_secret(self.bucket, self.run, folder / "secret"))
        self.secret.chmod(0o600)
        self.replicas = [TokenReplica(self.bucket, self.run) for _ in range(3)]
        self.ports = [free_port(), free_port()]
        self.processes, self.peaks = {}, Counter()
        self.receipts, self.taken = [], {}
        """The receipts by user, and the receipt of each report that was taken, by its id."""
        self.waits = defaultdict(list)
        self.seen = Counter()

    def command(self, *words):
        return [sys.executable, "-m", "deltawire", *map(str, words)]

    def call(self, *words):
        subprocess.run(
            self.command(*words), check=True, capture_output=True, timeout=120,
            env={**os.environ, **TOKENS},
        )  # fmt: skip

    def start(self, number):
        urls = [str(one.server.make_url("/")) for one in self.replicas]
        words = [
            "gateway", self.location, "--port", self.ports[number], "--capture-header",
            "--model-name", "*", "--secret", self.secret, "--state", self.folder / f"g{number}",
            "--feedback-per-minute", PER_MINUTE, "--first-token-s", 10,
            *(word for url in urls for word in ("--replica", url)),
        ]  # fmt: skip
        with (self.folder / f"g{number}.log").open("ab") as log:
            self.processes[number] = subprocess.Popen(
                self.command(*words), stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                env={**os.environ, **TOKENS},
            )  # fmt: skip

    def kill(self, number):
        self.measure()
        self.processes[number].kill()
        self.processes[number].wait()
        self.start(number)

    def measure(self):
        """Notes the most memory that each gateway's process has held."""
        for number, process in self.processes.items():
            with suppress(OSError, AttributeError):
                status = Path(f"/proc/{process.pid}/status").read_text()
                found = re.search(r"VmHWM:\s+(\d+) kB", status)
                self.peaks[number] = max(self.peaks[number], int(found[1]) << 10)

    def url(self, number, path):
        return f"http://127.0.0.1:{self.ports[number]}{path}"

    def log(self):
        return "".join((self.folder / f"g{n}.log").read_text() for n in (0, 1))


class User:
    """One user of the product, whose back end tries the other gateway if one is away."""

    def __init__(self, deployment, client, number):
        self.deployment, self.client, self.name = deployment, client, f"user {number}"
        self.chance, self.reports = random.Random(number), []
        self.gateway = number % 2

    async def live(self, ends):
        """Asks a few times until then, and reports, sooner or later."""
        await asyncio.sleep(self.chance.uniform(0, SECONDS * 0.8))
        messages = []
        for turn in range(self.chance.choice(TURNS)):
            messages.append({"role": "user", "content": f"{self.name} asks {turn}"})
            answer = await self.ask(list(messages))
            if answer is None:
                continue
            messages.append({"role": "assistant", "content": answer["text"]})
            if self.chance.random() < 0.7 and answer["receipt"]:
                self.reports.append(asyncio.create_task(self.report(answer["receipt"], ends)))
            await asyncio.sleep(self.chance.uniform(0.1, 5))
        await asyncio.gather(*self.reports)

    async def ask(self, messages):
        stream, leaves = self.chance.random() < 0.6, self.chance.random() < 0.05
        body = {"model": "m", "messages": messages, "stream": stream}
        if self.chance.random() < 0.2:
            tool = {"name": "look", "parameters": {"type": "object", "properties": {}}}
            body["tools"] = [{"type": "function", "function": tool}]
        headers = {
            "Authorization": "Bearer sampling", "x-deltawire-user": self.name,
            "x-deltawire-capture": "true" if self.chance.random() < 0.9 else "false",
        }  # fmt: skip
        for attempt in range(40):
            began = time.monotonic()
            number = (self.gateway + attempt) % 2
            url = self.deployment.url(number, "/v1/chat/completions")
            try:
                async with self.client.post(url, json=body, headers=headers) as answer:
                    self.deployment.seen[answer.status] += 1
                    if answer.status != 200:
                        await answer.read()
                        await asyncio.sleep(0.5)
                        continue
                    if leaves:
                        await answer.content.readany()
                        self.deployment.seen["left"] += 1
                        return None
                    found = await self.read(answer, stream, began)
            except (aiohttp.ClientError, OSError, TimeoutError):
                self.deployment.seen["broken"] += 1
                await asyncio.sleep(0.5)
                continue
            self.deployment.receipts.append((self.name, found["receipt"]))
            return found
        raise AssertionError(f"{self.name} was never answered: {self.deployment.seen}")

    async def read(self, answer, stream, began):
        if not stream:
            data = json.loads(await answer.read())
            self.deployment.waits["whole"].append(time.monotonic() - began)
            text = data["choices"][0]["message"]["content"]
            return {"text": text, "receipt": data["deltawire"]["receipt"]}
        text, receipt, first = "", "", True
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[len(b"data: ") :])
            said = "".join(c["delta"].get("content") or "" for c in chunk.get("choices", []))
            if said and first:
                self.deployment.waits["first"].append(time.monotonic() - began)
                first = False
            text += said
            receipt = chunk.get("deltawire", {}).get("receipt", receipt)
        self.deployment.waits["stream"].append(time.monotonic() - began)
        if not receipt:
            raise aiohttp.ClientPayloadError("the stream ended without a receipt")
        return {"text": text, "receipt": receipt}

    async def report(self, receipt, ends):
        """Reports soon or late, at either gateway, and at times twice."""
        late = min(self.chance.expovariate(1 / 10), max(0.0, ends - time.monotonic()))
        await asyncio.sleep(late)
        body = {
            "receipt": receipt, "kind": "thumbs", "value": self.chance.choice(["up", "down"]),
            "id": f"{self.name}-{self.chance.getrandbits(64):x}",
        }  # fmt: skip
        gateway = self.chance.randrange(2)
        assert await self.send(body, gateway), "no gateway took the report"
        if self.chance.random() < 0.2:
            assert await self.send(body, gateway), "the same report is the same"

    async def send(self, body, gateway, attempts=60):
        for attempt in range(attempts):
            url = self.deployment.url((gateway + attempt) % 2, "/v1/feedback")
            headers = {"Authorization": "Bearer sampling", "x-deltawire-user": self.name}
            with suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with self.client.post(url, json=body, headers=headers) as answer:
                    data = await answer.read()
                    if answer.status == 200:
                        self.deployment.taken[json.loads(data)["id"]] = body["receipt"]
                        return True
                    self.deployment.seen[f"report {answer.status}"] += 1
                    assert answer.status in (429, 503), data
            await asyncio.sleep(0.5)
        return False


async def flood(deployment, client):
    """One user reports as fast as it can; returns how many reports were taken and refused."""
    user = User(deployment, client, 10**6)
    asked = await user.ask([{"role": "user", "content": "flood"}])
    found = Counter()
    for number in range(4 * PER_MINUTE):
        body = {"receipt": asked["receipt"], "kind": "score", "value": 0.5, "id": f"flood {number}"}
        found[await user.send(body, 0, attempts=1)] += 1
    return found


async def strike(deployment):
    """The faults, one after another."""
    quarter = SECONDS / 8
    first, second, _ = deployment.replicas
    await asyncio.sleep(quarter)
    await asyncio.to_thread(deployment.kill, 0)
    await asyncio.sleep(quarter)
    first.mode = "hang"
    await asyncio.sleep(quarter / 2)
    first.mode = "tokens"
    second.lies = True
    await asyncio.sleep(quarter / 2)
    second.lies = False
    away = deployment.folder / "away"
    deployment.location.rename(away)
    await asyncio.sleep(AWAY_S)
    assert not deployment.location.exists(), "a bucket that is away is not made again"
    away.rename(deployment.location)
    await asyncio.sleep(quarter / 2)
    words = ("live", "secret", "rotate", deployment.location, "--secret", deployment.secret)
    await asyncio.to_thread(deployment.call, *words)
    await asyncio.sleep(quarter)
    await asyncio.to_thread(deployment.kill, 1)


async def ready(deployment, client):
    async with asyncio.timeout(120):
        for number in (0, 1):
            while True:
                with suppress(aiohttp.ClientError, OSError):
                    async with client.get(deployment.url(number, "/readyz")) as answer:
                        if answer.status == 200:
                            break
                await asyncio.sleep(0.1)


async def drive(deployment):
    """All users, and all faults."""
    for one in deployment.replicas:
        await one.server.start_server()
    for number in (0, 1):
        deployment.start(number)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=60)
    try:
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:
            await ready(deployment, client)
            decider = Decider(deployment.bucket)
            decider.decide("serve", 0)
            decider.decide("gate", 0, 2)
            decider.decide("canary", 0, 2, share=0.5, salt="s")
            await until(lambda: {one.mirror.version for one in deployment.replicas} == {0, 2})
            await asyncio.sleep(3)  # Each gateway looks for decisions.
            ends = time.monotonic() + SECONDS
            users = [User(deployment, client, n).live(ends) for n in range(USERS)]
            striking = asyncio.create_task(strike(deployment))
            await asyncio.gather(*users)
            await striking
            found = await flood(deployment, client)
            deployment.measure()
    finally:
        for process in deployment.processes.values():
            process.send_signal(signal.SIGTERM)
        for process in deployment.processes.values():
            await asyncio.to_thread(process.wait, 120)
        for one in deployment.replicas:
            await one.server.close()
    return found


def reader_of(deployment):
    """Returns a reader of receipts of all generations."""
    generations = parse_secret(deployment.secret.read_text(), place="")
    sealing = {one.fingerprint: one.receipt_key for one in generations}
    return lambda text: read_receipt(text, keys=ReceiptKeys(sealing), run=deployment.run.id)


def stored_twice(bucket):
    """Returns the answers with several rows in segments, or in compacted ones. A row may be in one
    of each: a gateway may be killed after it has compacted a segment."""
    plain = Counter(
        row.answer
        for _, _, _, rows in require_rows(bucket, keys.LIVE_CAPTURES, Capture)
        for row in rows
    )
    merged = Counter(
        decode_rows([row.data], Capture, run=bucket.url, key=place.key)[0].answer
        for owner in compacted_owners(bucket, "captures")
        for place in list_compacted(bucket, "captures", owner).segments
        for row in require_compacted(bucket, place) or ()
    )
    return [answer for found in (plain, merged) for answer, n in found.items() if n > 1]


def stored_name(receipt, name):
    """The answer and the stored id of a report: a hash, if the answer may not be stored."""
    if not receipt.recorded:
        name = "hidden-" + blake3(f"{receipt.answer}\0{name}".encode()).hexdigest()[:32]
    return receipt.answer, name


def share(values, part):
    return sorted(values)[min(int(len(values) * part), len(values) - 1)] if values else 0.0


def test_what_two_thousand_users_were_promised_holds(tmp_path, capsys):
    deployment = Deployment(tmp_path)
    began = time.monotonic()
    flooded = asyncio.run(drive(deployment))
    records = LiveRecords(deployment.bucket)
    records.poll()
    assert records.alarm == ""
    opens = reader_of(deployment)
    opened = [(name, opens(text)) for name, text in deployment.receipts]
    assert all(receipt is not None for _, receipt in opened), "a rotation loses no receipt"
    recorded = [receipt.answer for _, receipt in opened if receipt.recorded]
    stored = {(answer, name) for answer, about in records.reports.items() for _, name in about}
    taken = {stored_name(opens(text), name) for name, text in deployment.taken.items()}
    with capsys.disabled():
        waits = {
            name: [round(share(values, part), 3) for part in (0.5, 0.99)]
            for name, values in deployment.waits.items()
        }
        peaks = {n: round(size / 2**20) for n, size in deployment.peaks.items()}
        sys.stdout.write(
            f"\n{USERS} users, {time.monotonic() - began:.0f} s: {len(opened)} answers, "
            f"{len(recorded)} stored, {len(deployment.taken)} reports; "
            f"statuses {dict(deployment.seen)}; flood {dict(flooded)}; "
            f"seconds (p50, p99): {waits}; MiB of the gateways {peaks}\n"
        )
    assert len(opened) >= USERS
    assert len(set(recorded)) == len(recorded), "an answer has two receipts"
    assert not set(recorded) - records.answers.keys(), "an answer that was stored is lost"
    assert len(taken) == len(deployment.taken)
    assert not taken - stored, "a report that was taken is lost"
    assert not stored_twice(deployment.bucket), "an answer is stored twice"
    arms = defaultdict(set)
    for name, receipt in opened:
        arms[name].add(receipt.arm)
    assert {len(one) for one in arms.values()} == {1}, "a user is in two arms"
    assert set().union(*arms.values()) == {"serving", "candidate"}
    assert flooded[True] <= PER_MINUTE + 20
    assert flooded[False] >= 2 * PER_MINUTE
    assert max(deployment.peaks.values()) <= MOST_MEMORY
    assert len(stored_owners(deployment.bucket, "captures")) == 2
    forget(deployment, opened)


def forget(deployment, opened):
    """Erases one user, who has pseudonyms of two generations at most."""
    name = next(name for name, receipt in opened if receipt.recorded)
    pseudonyms = {receipt.user for one, receipt in opened if one == name}
    deployment.call("forget", deployment.location, name, "--secret", deployment.secret)
    for key in deployment.bucket.list(keys.LIVE):
        data = deployment.bucket.get(key, limit=1 << 30)
        if not key.startswith(keys.LIVE_FORGOTTEN):
            assert not [one for one in pseudonyms if one.encode() in data], key
    records = LiveRecords(deployment.bucket)
    records.poll()
    assert not [row for row in records.answers.values() if row.user in pseudonyms]

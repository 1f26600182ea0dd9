"""``rollback_polls``: polls until every replica is back after a rollback.

A router and `REPLICAS` replicas, each with a mirror that it loads from the bucket, go through
`ROLLBACKS` canaries of random shares. From the moment a rollback is stored, the router's polls of
the decisions are counted, and from then on the polls of each replica until it holds the restored
version, whose digest is computed from the bits that it holds. The key is the largest sum.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

from benchmarks.training.keys import Measured, Options
from deltawire import codec
from deltawire.live.gateway.routing import ArmRouter
from deltawire.runtime.decision_log import DecisionLog
from deltawire.serving.contract import CacheReset
from deltawire.serving.replica import HeldVersion, Replica
from deltawire.serving.replica_set import ReplicaSet
from deltawire.store import Bucket, open_bucket
from deltawire.sync import load_mirror, read_manifest
from deltawire.testing.tiny import start_publisher, start_run, weights
from deltawire.wire.decisions import Decision, ServedVersion, Verdict
from deltawire.wire.run import Run

REPLICAS = 8
ROLLBACKS = 20
VERSIONS = 4
WITHIN_S = 120.0


class MirrorReplica(Replica):
    """A replica that holds a mirror; ``polls`` counts how often it was asked what it holds."""

    def __init__(self, name: str, bucket: Bucket, run: Run) -> None:
        self.name, self.base_url = name, f"http://{name}"
        self.polls = 0
        self._bucket, self._run = bucket, run
        self._load(0)

    def _load(self, version: int) -> None:
        mirror = load_mirror(self._bucket, self._run, at=version)
        self.mirror = mirror

    @property
    def digest(self) -> str:
        """The digest of the bits that it holds."""
        return codec.digest_model(self.mirror.tensors).hex()

    async def held(self) -> HeldVersion:
        """See `deltawire.serving.replica.Replica`."""
        self.polls += 1
        return HeldVersion(self.mirror.version, self.digest)

    async def load(self, version: int, *, cache: CacheReset) -> HeldVersion:
        """See `deltawire.serving.replica.Replica`."""
        del cache
        await asyncio.to_thread(self._load, version)
        return HeldVersion(self.mirror.version, self.digest)


class _Decider:
    def __init__(self, bucket: Bucket, run: Run) -> None:
        self._bucket, self._run = bucket, run
        self._log = DecisionLog(bucket, run.id)

    def served(self, version: int) -> ServedVersion:
        manifest = read_manifest(self._bucket, self._run, version)
        assert manifest is not None
        return ServedVersion(version, manifest.digest)

    def decide(
        self, verdict: Verdict, serving: int, candidate: int | None = None, **more: Any
    ) -> None:
        self._log.poll()
        stored = self._log.append(
            Decision(
                number=self._log.next_number,
                run=self._run.id,
                verdict=verdict,
                serving=self.served(serving),
                candidate=None if candidate is None else self.served(candidate),
                at=time.time(),
                by="bench",
                **more,
            )
        )
        assert stored


async def _until(condition: Any) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():
            await asyncio.sleep(0.001)


async def _rollback(
    decider: _Decider, router: ArmRouter, replicas: list[MirrorReplica], rng: random.Random
) -> int:
    """Begin a canary and roll it back; returns the polls of the slowest replica."""
    number, candidate = decider.served(0), rng.randrange(1, VERSIONS)
    salt = f"{rng.random()}"
    decider.decide("gate", 0, candidate)
    decider.decide("canary", 0, candidate, share=rng.uniform(0.05, 0.9), salt=salt)
    await router.poll()
    await _until(lambda: any(one.mirror.version == candidate for one in replicas))
    await asyncio.sleep(rng.random() * 0.2)
    decider.decide("rollback", 0, candidate)
    decisions = 0
    while router.decision is None or router.decision.verdict != "rollback":
        decisions += 1
        await router.poll()
    before = {one.name: one.polls for one in replicas}
    polls: dict[str, int] = {}

    def back() -> bool:
        for one in replicas:
            if one.name not in polls and one.mirror.version == 0 and one.digest == number.digest:
                polls[one.name] = one.polls - before[one.name]
        return len(polls) == len(replicas)

    await _until(back)
    return decisions + max(polls.values())


async def _measure(seed: int) -> list[int]:
    bucket = open_bucket("memory://", create=True)
    publisher = start_publisher(bucket)
    for version in range(VERSIONS):
        publisher.publish(weights(version))
    publisher.close()
    run = start_run(bucket)
    replicas = [MirrorReplica(f"r{number}", bucket, run) for number in range(REPLICAS)]
    decider, rng = _Decider(bucket, run), random.Random(seed)
    moved = ReplicaSet(bucket, run, replicas)
    moved.start()
    try:
        router = ArmRouter(moved)
        decider.decide("serve", 0)
        await router.poll()
        return [await _rollback(decider, router, replicas, rng) for _ in range(ROLLBACKS)]
    finally:
        await moved.close()


def measure(options: Options) -> Measured:
    """Measures the key."""
    found = asyncio.run(_measure(options.seed))
    details = {"rollbacks": ROLLBACKS, "replicas": REPLICAS, "polls": found}
    return Measured({"rollback_polls": float(max(found))}, details)

"""Arms, replicas and receipts follow the decisions in the bucket."""

import asyncio
import json
import threading
from contextlib import asynccontextmanager

import msgspec
import pytest
from live_decider import Decider, in_loop, until
from live_gateway import KEYS, live_serving, published

from deltawire.errors import CorruptError
from deltawire.live.gateway import routing
from deltawire.live.gateway.routing import ArmRouter
from deltawire.serving.replica import HeldVersion, Replica
from deltawire.serving.replica_set import ReplicaSet
from deltawire.sync import read_run
from deltawire.wire.decisions import CANDIDATE, Decision, ServedVersion
from deltawire.wire.receipts import SERVING, read_receipt


def held(gateway):
    return sorted(fake.mirror.version for fake in gateway.fakes)


async def ask(gateway, user, conversation):
    """Ask one question; returns its receipt."""
    status, data, _ = await gateway.call(
        "POST", "/v1/chat/completions",
        headers={
            "x-deltawire-user": user, "x-deltawire-capture": "true",
            "x-deltawire-conversation": conversation,
        },
        json={"model": "m", "messages": [{"role": "user", "content": "Hi"}]},
    )  # fmt: skip
    assert status == 200
    text = json.loads(data)["deltawire"]["receipt"]
    return read_receipt(text, keys=KEYS, run=read_run(gateway.bucket).id)


@in_loop
async def test_a_canary_and_its_rollback(tmp_path, monkeypatch):
    monkeypatch.setattr(routing, "POLL_EVERY_S", 0.02)
    bucket = published()
    decider = Decider(bucket)
    async with live_serving(bucket, tmp_path, monkeypatch, replicas=2) as gateway:
        first = await ask(gateway, "u0", "before")
        assert (first.arm, first.propensity) == (SERVING, 1.0)
        decider.decide("serve", 0)
        decider.decide("gate", 0, 2)
        decider.decide("canary", 0, 2, share=0.5, salt="s")
        await until(lambda: held(gateway) == [0, 2])
        receipts = {}
        async with asyncio.timeout(60):
            while len({r.arm for r in receipts.values() if r.propensity < 1}) < 2:
                name = f"u{len(receipts)}"
                receipts[name] = await ask(gateway, name, f"c-{name}")
        versions = {CANDIDATE: 2, SERVING: 0}
        for name, receipt in receipts.items():
            if receipt.propensity < 1:
                assert receipt.propensity == 0.5
                assert [v for v, _ in receipt.spans] == [versions[receipt.arm]]
                again = await ask(gateway, name, f"c-{name}")
                assert again.arm == receipt.arm
        status, data, _ = await gateway.call(
            "POST", "/hot_load/v1/models/hot_load", token="admin-secret", json={"identity": "1"}
        )
        assert status == 400
        assert b"decisions in the bucket" in data
        decider.decide("rollback", 0, 2)
        await until(lambda: held(gateway) == [0, 0])
        digest = decider.served(0).digest
        assert {fake.mirror.digest.hex() for fake in gateway.fakes} == {digest}
        for name in receipts:
            after = await ask(gateway, name, f"c-{name}")
            assert (after.arm, after.propensity) == (SERVING, 1.0)
            assert [v for v, _ in after.spans] == [0]


class StillReplica(Replica):
    """A replica that loads at once; ``loads`` are the versions that it was told to."""

    def __init__(self, name, digests):
        self.name, self.digests, self.loads, self.version = name, digests, [], 0
        self.base_url = f"http://{name}"

    async def held(self):
        return HeldVersion(self.version, self.digests[self.version])

    async def load(self, version, *, cache):
        self.loads.append(version)
        self.version = version
        return await self.held()


@asynccontextmanager
async def routed(bucket=None):
    """A router over four replicas, polled by hand."""
    bucket = bucket or published()
    decider = Decider(bucket)
    digests = {version: decider.served(version).digest for version in range(3)}
    fakes = [StillReplica(f"r{number}", digests) for number in range(4)]
    replicas = ReplicaSet(bucket, decider.run, fakes)
    replicas.start()
    try:
        yield ArmRouter(replicas), decider, fakes
    finally:
        await replicas.close()


@in_loop
async def test_two_polls_bring_every_replica_back():
    """One poll of the decisions and one of each replica."""
    async with routed() as (router, decider, fakes):
        decider.decide("serve", 0)
        decider.decide("gate", 0, 1)
        decider.decide("canary", 0, 1, share=0.3, salt="s")
        await router.poll()
        await until(lambda: [fake.version for fake in fakes].count(1) == 1)
        decider.decide("canary", 0, 1, share=0.5, salt="s")
        candidate = next(fake for fake in fakes if fake.version == 1)
        await router.poll()
        await until(lambda: [fake.version for fake in fakes].count(1) == 2)
        assert candidate.version == 1, "a replica keeps its version as the share grows"
        decider.decide("rollback", 0, 1)
        await router.poll()
        await until(lambda: all(fake.version == 0 for fake in fakes))
        assert candidate.loads == [1, 0]
        assert router.assignment("user", "conversation").propensity == 1.0


@in_loop
async def test_a_conversation_keeps_its_arm_as_the_share_grows():
    async with routed() as (router, decider, _):
        decider.decide("serve", 0)
        decider.decide("gate", 0, 1)
        decider.decide("canary", 0, 1, share=0.25, salt="s")
        await router.poll()
        await until(lambda: router._replicas.serves(0) and router._replicas.serves(1))
        before = {n: router.assignment(f"u{n}", f"c{n}") for n in range(200)}
        assert 20 < sum(one.arm == CANDIDATE for one in before.values()) < 85
        decider.decide("canary", 0, 1, share=0.75, salt="s")
        await router.poll()
        await until(lambda: router._replicas.serves(0) and router._replicas.serves(1))
        assert {n: router.assignment(f"u{n}", f"c{n}") for n in range(200)} == before
        fresh = [router.assignment(f"u{n}", f"new{n}") for n in range(200)]
        assert all(fresh[n].arm == CANDIDATE for n in before if before[n].arm == CANDIDATE)
        assert sum(one.arm == CANDIDATE for one in fresh) > 115
        assert router.assignment("", "nobody") == (SERVING, 1.0, 0, 0.0)


@in_loop
async def test_a_decision_about_other_weights_moves_nothing():
    async with routed() as (router, decider, fakes):
        decider.decide("serve", 0)
        await router.poll()
        forged = ServedVersion(1, "0" * 32)
        decider.log.append(
            Decision(
                number=1,
                run=decider.run.id,
                verdict="promote",
                serving=forged,
                at=0.0,
                by="mallory",
            )
        )
        with pytest.raises(CorruptError, match="its manifest states"):
            await router.poll()
        assert router.assignment("u", "c").version == 0
        assert {fake.version for fake in fakes} == {0}


def decide_at_once(logs, decisions):
    """Append a decision from each log at the same moment; returns whether each was stored."""
    together, stored = threading.Barrier(len(logs)), [False] * len(logs)

    def append(place):
        logs[place].poll()
        together.wait(60)
        stored[place] = logs[place].append(decisions[place])

    threads = [threading.Thread(target=append, args=(place,)) for place in range(len(logs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return stored


@in_loop
async def test_two_gateways_that_decide_at_once_serve_what_one_of_them_decided():
    bucket = published()
    async with routed(bucket) as (here, decider, _), routed(bucket) as (there, other, _):
        decider.decide("serve", 0)

        def both(verdict, candidates, shares=(0.0, 0.0)):
            one = [
                Decision(
                    number=decider.log.next_number, run=decider.run.id, verdict=verdict, at=0.0,
                    by=name, serving=decider.served(0), candidate=decider.served(candidate),
                    share=share, salt=name if share else "",
                )
                for name, candidate, share in zip("gh", candidates, shares, strict=True)
            ]  # fmt: skip
            stored = decide_at_once([decider.log, other.log], one)
            assert sorted(stored) == [False, True]
            return one[stored.index(True)]

        gated = both("gate", (1, 2))
        decided = both("canary", (gated.candidate.version,) * 2, (0.25, 0.5))
        assert decider.log.decisions == other.log.decisions
        assert not decider.log.void
        for router in (here, there):
            await router.poll()
            assert router.decision == msgspec.structs.replace(
                decided, previous=router.decision.previous
            )
            await until(
                lambda r=router: (
                    r._replicas.serves(0) and r._replicas.serves(gated.candidate.version)
                )
            )
        arms = {n: here.assignment(f"u{n}", f"c{n}") for n in range(200)}
        assert arms == {n: there.assignment(f"u{n}", f"c{n}") for n in range(200)}
        shown = [one for one in arms.values() if one.arm == CANDIDATE]
        assert {one.version for one in shown} == {gated.candidate.version}
        assert {one.propensity for one in shown} == {decided.share}

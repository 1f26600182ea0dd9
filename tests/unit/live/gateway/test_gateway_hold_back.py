"""Some users keep the hold-back version, on the third replica of a gateway."""

import itertools

import pytest
from live_decider import Decider, in_loop, until
from live_gateway import KEYS, live_serving, published

from deltawire.live.gateway import routing
from deltawire.sync import read_run
from deltawire.wire.captures import NOT_STORED
from deltawire.wire.decisions import CANDIDATE, HOLD_BACK
from deltawire.wire.receipts import SERVING, read_receipt

USERS = 40


def held(gateway):
    return sorted(fake.mirror.version for fake in gateway.fakes)


@pytest.mark.parametrize(("replicas", "versions"), [(3, [0, 1, 2]), (2, [1, 2])])
def test_users_keep_the_hold_back_version_where_a_third_replica_holds_it(
    replicas, versions, tmp_path, monkeypatch
):
    @in_loop
    async def scenario():
        monkeypatch.setattr(routing, "POLL_EVERY_S", 0.02)
        bucket = published()
        decider = Decider(bucket)
        kept = {"hold_back": decider.served(0), "hold_back_share": 0.5}
        async with live_serving(bucket, tmp_path, monkeypatch, replicas=replicas) as gateway:
            decider.decide("serve", 0, **kept)
            decider.decide("promote", 1, **kept)
            decider.decide("gate", 1, 2, **kept)
            decision = decider.decide("canary", 1, 2, share=0.5, salt="s", **kept)
            await until(lambda: held(gateway) == versions)
            names = itertools.count()  # Each conversation keeps its first arm.
            await until(
                lambda: gateway.recorder.assign("0" * 32, f"{next(names):032x}").propensity < 1
            )
            for number in range(USERS):
                await gateway.receipt(user=f"u{number}", capture="true" if number % 2 else "")
            run = read_run(bucket).id
            captures, _ = await gateway.uploaded()
            assert len(captures) == USERS
            drawn = {SERVING: 1, CANDIDATE: 2, HOLD_BACK: 0}
            assert {one.spans[0][0] for one in captures} == set(versions)
            for one in captures:
                assert {version for version, _ in one.spans} == {drawn[one.arm]}
            shares = {one.arm: one.propensity for one in captures if one.kept}
            assert shares == ({SERVING: 0.5, HOLD_BACK: 0.5} if replicas == 3 else {})
            assert {one.kept for one in captures} == ({None, 0.5} if replicas == 3 else {None})
            assert NOT_STORED in {one.unusable for one in captures if one.arm == SERVING}
            receipt = await gateway.receipt(user="u1")
            assert read_receipt(receipt, keys=KEYS, run=run).arm in drawn
            assert decision.held_back == (decider.served(0))

    scenario()

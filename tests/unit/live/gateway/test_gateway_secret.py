"""Gateways of one deployment: one secret, one pseudonym and one arm for each user."""

import asyncio
import json
import secrets
from contextlib import AsyncExitStack

import pytest
from live_gateway import GENERATION, deployment_secret, live_serving, published
from test_gateway_canary import Decider, in_loop, until

from deltawire.errors import InputError
from deltawire.launch.live_secret import SecretPlace, create_secret, rotate_secret
from deltawire.live.capture.consent import ConsentRule
from deltawire.live.erasure.forgetting import forget_pseudonyms
from deltawire.live.gateway import routing
from deltawire.live.release.next_decision import Situation, decide_next
from deltawire.sync import read_run
from deltawire.wire import keys
from deltawire.wire.captures import GatewayState
from deltawire.wire.decisions import CANDIDATE
from deltawire.wire.live_secret import Readmitted
from deltawire.wire.objects import encode_json
from deltawire.wire.receipts import SERVING, read_receipt


def opened(at, text):
    return read_receipt(text, keys=at.recorder.secret.receipt_keys, run=at.recorder._run.id)


async def ask(at, user, **options):
    return opened(at, await at.receipt(user=user, **options))


@in_loop
async def test_two_gateways_know_the_same_users_and_receipts(tmp_path, monkeypatch):
    bucket = published(1)
    async with AsyncExitStack() as stack:
        one, two = [
            await stack.enter_async_context(live_serving(bucket, tmp_path / n, monkeypatch))
            for n in ("one", "two")
        ]
        text = await one.receipt(user="alice")
        assert opened(two, text) == opened(one, text)
        assert (await ask(two, "alice")).user == opened(one, text).user
        assert (await two.report(text))[0] == 200
        assert (await two.report(text, headers={"x-deltawire-user": "alice"}, id="r"))[0] == 200


@in_loop
async def test_one_user_whatever_the_encoding_of_its_name(tmp_path, monkeypatch):
    async with live_serving(published(1), tmp_path, monkeypatch) as at:
        found = {(await ask(at, name)).user for name in ("jos\xe9", "jose\u0301", "jos\xe9 \u00a0")}
        for name in ("jose\u0301 ", "jos\xe9"):
            found.add((await ask(at, "", safety_identifier=name)).user)
        reader, writer = await asyncio.open_connection("127.0.0.1", at.port)
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hi"}]}).encode()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer "
            b"sampling-secret\r\nConnection: close\r\nx-deltawire-user: jos\xe9\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        answer = json.loads((await reader.read()).partition(b"\r\n\r\n")[2])
        writer.close()
        found.add(opened(at, answer["deltawire"]["receipt"]).user)
        assert found == {GENERATION.pseudonyms.user("jos\xe9")}


@in_loop
async def test_users_without_a_name_share_no_conversation(tmp_path, monkeypatch):
    async with live_serving(published(1), tmp_path, monkeypatch, replicas=2) as at:
        one, two = await ask(at, "", text="Hi"), await ask(at, "", text="Hi")
        assert one.conversation != two.conversation
        assert (await at.uploaded())[1] == [], "the second is no retry of the first"
        assert sorted(len(fake.seen) for fake in at.fakes) == [0, 2], "one replica for one opening"
        named = [await ask(at, "alice", text="Hi") for _ in range(2)]
        assert len({one.conversation for one in named}) == 1


def canary_runs(at):
    return at.recorder.assign("a user", secrets.token_hex(8)).propensity < 1


def rotated(bucket, tmp_path):
    """A deployment and the place of its secret, for a gateway that reads it again each round."""
    run, place = read_run(bucket), SecretPlace(tmp_path / "live.secret")
    secret = create_secret(bucket, run, place)
    return run, place, {"secret": secret, "reread": lambda: place.read(bucket, run)}


async def next_round(at):
    at.recorder._state_at = float("-inf")
    return await at.uploaded()


@in_loop
async def test_a_rotation_waits_for_the_canary_and_loses_no_user(tmp_path, monkeypatch):
    monkeypatch.setattr(routing, "POLL_EVERY_S", 0.02)
    bucket = published()
    run, place, options = rotated(bucket, tmp_path)
    decider = Decider(bucket)
    users = [f"u{number}" for number in range(12)]
    async with live_serving(bucket, tmp_path / "s", monkeypatch, replicas=2, **options) as at:
        decider.decide("serve", 0)
        decider.decide("gate", 0, 2)
        decider.decide("canary", 0, 2, share=0.5, salt="s")
        await until(lambda: canary_runs(at))
        text = await at.receipt(user="u0")
        before = {user: await ask(at, user) for user in users}
        assert {one.arm for one in before.values()} == {SERVING, CANDIDATE}
        await next_round(at)
        with pytest.raises(InputError, match="do not hold it"):
            await asyncio.to_thread(rotate_secret, bucket, run, place, wait_s=0)
        assert (await ask(at, "u0")).user == before["u0"].user
        await next_round(at)  # It reads the secret and states that it holds the generation.
        secret = await asyncio.to_thread(rotate_secret, bucket, run, place, wait_s=0)
        await next_round(at)
        assert at.recorder.secret.current_number == 1
        during = {user: await ask(at, user) for user in users}
        assert {u: (r.user, r.arm) for u, r in during.items()} == {
            u: (r.user, r.arm) for u, r in before.items()
        }
        name = (await at.receipt(user="u0")).split(".")[1]
        assert name == secret.current.fingerprint, "new receipts are sealed by the new generation"
        decider.decide("promote", 2)
        await until(lambda: at.recorder.generation() is None)
        after = await ask(at, "u0")
        assert after.user == secret.current.pseudonyms.user("u0") != before["u0"].user
        assert (await at.report(text, headers={"x-deltawire-user": "u0"}))[0] == 200
        captures, _ = await next_round(at)
        mine = {before["u0"].user, after.user}
        assert {row.user for row in captures} > mine
        record = forget_pseudonyms(bucket, run, sorted(mine))
        assert record.answers == sum(row.user in mine for row in captures)
        await ask(at, "u0")
        captures, feedback = await next_round(at)
        assert not [row for row in (*captures, *feedback) if row.user in mine]


@in_loop
async def test_a_user_forgotten_under_an_earlier_generation_is_not_stored(tmp_path, monkeypatch):
    bucket = published(1)
    run, place, options = rotated(bucket, tmp_path)
    first = options["secret"].current.pseudonyms.user("alice")
    async with live_serving(bucket, tmp_path / "s", monkeypatch, **options) as at:
        forget_pseudonyms(bucket, run, [first])
        rotate_secret(bucket, run, place, wait_s=0)
        await next_round(at)
        assert not (await ask(at, "alice")).recorded
        bucket.put(keys.live_readmitted(first), encode_json(Readmitted(run=run.id, at=0.0)))
        await next_round(at)
        receipt = await ask(at, "alice")
        assert receipt.recorded
        assert receipt.user == at.recorder.secret.current.pseudonyms.user("alice")
        (row,), _ = await next_round(at)
        assert row.answer == receipt.answer


@in_loop
async def test_a_gateway_that_lacks_the_canarys_generation_assigns_no_user(tmp_path, monkeypatch):
    monkeypatch.setattr(routing, "POLL_EVERY_S", 0.02)
    bucket = published()
    decider = Decider(bucket)
    async with live_serving(bucket, tmp_path, monkeypatch, replicas=2) as at:
        decider.decide("serve", 0)
        decider.decide("gate", 0, 2)
        decider.decide("canary", 0, 2, share=0.5, salt="s", generation=7)
        await until(lambda: canary_runs(at))
        found = {(r.arm, r.propensity) for r in [await ask(at, f"u{n}") for n in range(8)]}
        assert found == {(SERVING, 1.0)}


def test_a_canary_keeps_the_generation_that_it_began_with():
    from deltawire.config.release import ReleaseConfig

    bucket = published()
    decider = Decider(bucket)
    decider.decide("serve", 0)
    decider.decide("gate", 0, 2)
    release = ReleaseConfig(gate={}, stages=[0.1, 0.5])
    decider.log.poll()
    situation = Situation(newest=decider.served(2), generation=3, now=0.0)
    canary = decide_next(decider.log, release, situation, by="g0")
    assert (canary.verdict, canary.generation) == ("canary", 3)
    assert decider.log.append(canary)
    other = {"share": 0.5, "salt": canary.salt}
    with pytest.raises(InputError, match="assigns users again"):
        decider.decide("canary", 0, 2, **other, generation=4)
    decider.decide("canary", 0, 2, **other, generation=3)


@in_loop
async def test_a_share_of_users_stays_the_same_over_a_rotation(tmp_path, monkeypatch):
    bucket = published(1)
    run, place, options = rotated(bucket, tmp_path)
    options["consent"] = ConsentRule(share=0.5)
    async with live_serving(bucket, tmp_path / "s", monkeypatch, **options) as at:
        users = [f"u{number}" for number in range(16)]
        before = [(await ask(at, user, capture="")).recorded for user in users]
        assert set(before) == {True, False}
        rotate_secret(bucket, run, place, wait_s=0)
        await next_round(at)
        assert [(await ask(at, user, capture="")).recorded for user in users] == before


def test_a_gateway_states_what_it_holds(tmp_path):
    bucket = published(1)
    secret = deployment_secret(bucket, read_run(bucket))
    state = GatewayState(
        gateway="g0", run="0" * 32, started=0.0, at=0.0, generations=list(secret.held)
    )
    assert GENERATION.fingerprint in encode_json(state).decode()
    assert GENERATION.secret.hex() not in encode_json(state).decode()
    assert GENERATION.secret.hex() not in repr(GENERATION)

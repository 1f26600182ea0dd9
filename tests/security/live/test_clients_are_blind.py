"""Nothing that a client can read tells which arm or version answered; the admin token does."""

import json
import re

import pytest
from live_answers import config_of
from live_decider import Decider, in_loop, until
from live_gateway import ADMIN, KEYS, TOKEN, TokenReplica, live_serving, published

from deltawire.live.gateway import routing
from deltawire.sync import read_run
from deltawire.wire.decisions import CANDIDATE
from deltawire.wire.receipts import SERVING, read_receipt

RECEIPT = re.compile(rb"dw2\.[\w.-]+")
RANDOM = frozenset({"x-request-id", "x-deltawire-answer"})


class TellingReplica(TokenReplica):
    """States its version wherever an engine may."""

    def stated(self, body):
        version = self.mirror.version
        for row in body["choices"]:
            if "token_ids" in row:
                row["token_versions"] = [version] * len(row["token_ids"])
        return body | {
            "model": f"model-v{version}", "system_fingerprint": f"version-{version}",
            "weight_version": str(version),
        }  # fmt: skip


async def asked(gateway, user, token=TOKEN, **body):
    """Returns all that a client gets, without what is random for each answer."""
    headers = {"x-deltawire-user": user, "x-deltawire-capture": "true"}
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]} | body
    status, data, found = await gateway.call(
        "POST", "/v1/chat/completions", token, headers, json=body
    )
    shown = {name.lower(): value for name, value in found.items() if name.lower() != "date"}
    for name in RANDOM & shown.keys():
        assert re.fullmatch("[0-9a-f]{32}", shown[name]), name
        shown[name] = "random"
    text = b"%d %s %s" % (status, json.dumps(shown).encode(), data)
    receipts = RECEIPT.findall(text)
    return RECEIPT.sub(b"RECEIPT", text), {len(one) for one in receipts}, receipts, data, found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", ["tokens", "fail"])
def test_answers_of_both_arms_look_the_same(mode, stream, tmp_path, monkeypatch):
    """Byte for byte but for the receipts, which are encrypted and of one length."""
    monkeypatch.setattr(routing, "POLL_EVERY_S", 0.02)
    release = config_of(release={"stages": [0.5]}).live.release

    @in_loop
    async def scenario():
        bucket = published()
        decider = Decider(bucket)
        async with live_serving(
            bucket, tmp_path, monkeypatch, replicas=2, replica=TellingReplica, release=release
        ) as gateway:
            decider.decide("serve", 0)
            decider.decide("gate", 0, 2)
            decider.decide("canary", 0, 2, share=0.5, salt="s")
            await until(lambda: sorted(f.mirror.version for f in gateway.fakes) == [0, 2])
            for fake in gateway.fakes:
                fake.mode = mode
            seen, lengths, drawn = set(), set(), {}
            for number in range(40):
                text, sizes, receipts, _, _ = await asked(
                    gateway, f"u{number}", stream=stream, return_token_ids=True
                )
                seen.add(text)
                lengths |= sizes
                for one in receipts:
                    opened = read_receipt(one.decode(), keys=KEYS, run=read_run(bucket).id)
                    drawn.setdefault(opened.arm, []).append(opened.spans)
            assert len(seen) == 1
            assert all(sum(len(fake.seen) for fake in gateway.fakes) for _ in seen)
            assert min(len(fake.seen) for fake in gateway.fakes) > 0, "both arms answered"
            status, health, _ = await gateway.call("GET", "/health")
            assert (status, json.loads(health)) == (200, {"ready": True})
            if mode == "fail":
                assert b"out of memory" not in seen.pop()
                return
            assert len(lengths) == 1
            assert drawn.keys() == {SERVING, CANDIDATE}
            assert all(v == 2 for spans in drawn[CANDIDATE] for v, _ in spans)
            _, _, _, data, headers = await asked(gateway, "u0", ADMIN, return_token_ids=True)
            body = json.loads(data)
            (revealed,) = body["deltawire"]["revealed"]
            version = revealed["versions"][0][0]
            assert revealed["arm"] in (SERVING, CANDIDATE)
            assert revealed["propensity"] == 0.5
            assert body["system_fingerprint"] == f"version-{version}"
            assert headers["x-deltawire-snapshot"].endswith(f"{version}")

    scenario()


def test_an_error_in_a_stream_tells_nothing_of_its_replica(tmp_path, monkeypatch):
    class Failing(TellingReplica):
        def stated(self, body):
            if any(row.get("delta", {}).get("content") for row in body["choices"]):
                return {"error": {"message": f"version {self.mirror.version} of secret-replica"}}
            return super().stated(body)

    @in_loop
    async def scenario():
        async with live_serving(published(), tmp_path, monkeypatch, replica=Failing) as gateway:
            text, *_ = await asked(gateway, "alice", stream=True)
            assert b"the replica failed" in text
            assert b"secret-replica" not in text

    scenario()


def test_a_replica_that_breaks_off_is_not_named(tmp_path, monkeypatch):
    @in_loop
    async def scenario():
        async with live_serving(published(), tmp_path, monkeypatch) as gateway:
            from aiohttp import web

            async def gone(request):
                request.transport.abort()
                return web.Response()

            gateway.fake.chat = gone
            monkeypatch.setattr(TokenReplica, "whole", lambda *_: 1 / 0)
            text, *_ = await asked(gateway, "alice")
            assert str(gateway.fake.server.port).encode() not in text

    scenario()

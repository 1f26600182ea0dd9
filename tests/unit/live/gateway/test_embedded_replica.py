"""The embedded engine as a replica: a gateway captures its tokens and changes its version."""

import asyncio
import json
import time
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import torch
from aiohttp.test_utils import TestServer
from granted_groups import start_with_groups
from live_gateway import KEYS, deployment_secret, rows_in

from deltawire.chat.requests import RequestDefaults
from deltawire.cli.arguments import location_of
from deltawire.config import BuildConfig
from deltawire.errors import InputError, ResyncError
from deltawire.export.models import empty_model, fetch_model_files
from deltawire.live.capture.consent import ConsentRule
from deltawire.live.capture.redaction import Redaction
from deltawire.live.gateway.app import LiveCalls
from deltawire.live.gateway.embedded_replica import open_replica
from deltawire.live.gateway.recorder import Recorder, RecorderOptions
from deltawire.rl.trainer.trainer import Trainer
from deltawire.runtime.lines import publication_bucket
from deltawire.runtime.process import Process, open_run
from deltawire.runtime.trusted import ANY
from deltawire.serving.app import build_app
from deltawire.serving.replica_set import ReplicaSet
from deltawire.serving.vllm import VllmReplica
from deltawire.sync import newest_version, read_manifest, read_run
from deltawire.wire.receipts import hash_tokens, read_receipt

TOKEN, ADMIN, UPSTREAM = "sampling", "admin", "upstream"
ASK = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
def bucket(tmp_path):
    train = {"versions": 2, "groups_per_step": 1, "max_staleness": 100}
    return start_with_groups(tmp_path, groups=2, train=train)


def publish(bucket, until):
    """Train until a version is committed."""
    torch.set_num_threads(1)
    run, config = open_run(bucket)
    with fetch_model_files(bucket, run) as folder:
        model = empty_model(Path(folder))
    process = Process(bucket, "trainer", "trainer", supervised=False)
    Trainer(process, run, config, model).loop()
    assert newest_version(bucket) == until


@asynccontextmanager
async def replica_on(bucket, **options):
    """The replica, and a gateway's view of it."""
    process = Process(bucket, "replica", "worker", supervised=False)
    replica = await asyncio.to_thread(open_replica, process, token=UPSTREAM, **options)
    server = TestServer(replica.app())
    await server.start_server()
    serving = asyncio.create_task(replica.serve())
    async with aiohttp.ClientSession() as session:
        member = VllmReplica(str(server.make_url("/")), session, key=UPSTREAM)
        try:
            yield member, session
        finally:
            process.stop()
            await serving
            await server.close()


def test_a_captured_answer_has_the_tokens_and_versions_of_the_engine(bucket, tmp_path):
    async def scenario():
        async with replica_on(bucket, hold=True) as (member, session):
            run, _ = open_run(bucket)
            options = RecorderOptions(consent=ConsentRule(share=1.0))
            recorder = Recorder(
                bucket, run, tmp_path / "state", deployment_secret(bucket, run), Redaction(None),
                options,
            )  # fmt: skip
            members = ReplicaSet(bucket, run, [member])
            app = build_app(members, session, token=TOKEN, admin_token=ADMIN)
            LiveCalls(recorder, RequestDefaults()).add_to(app)
            gateway = TestServer(app)
            await gateway.start_server()
            async with asyncio.timeout(60):
                while not members.ready:
                    await asyncio.sleep(0.02)
            headers = {"Authorization": f"Bearer {TOKEN}", "x-deltawire-user": "alice"}
            url = str(gateway.make_url("/v1/chat/completions"))
            async with session.post(url, json=ASK, headers=headers) as answer:
                whole = await answer.json()
            async with session.post(url, json=ASK | {"stream": True}, headers=headers) as answer:
                events = (await answer.text()).split("\n\n")
            assert await asyncio.to_thread(recorder.uploader.upload)
            await gateway.close()
        return whole, events, run

    whole, events, run = asyncio.run(scenario())
    assert "token_ids" not in whole["choices"][0]
    assert "prompt_token_ids" not in whole
    chunks = [json.loads(e.removeprefix("data: ")) for e in events[:-2]]
    assert not any("tokens_follow" in row for chunk in chunks for row in chunk["choices"])
    receipts = [whole["deltawire"]["receipt"], chunks[-1]["deltawire"]["receipt"]]
    captures, _ = rows_in(bucket)
    assert len(captures) == 2
    assert not any(row.unusable for row in captures)
    for row, text in zip(sorted(captures, key=lambda row: row.at), receipts, strict=True):
        receipt = read_receipt(text, keys=KEYS, run=run.id)
        assert receipt.recorded
        assert receipt.spans == row.spans == [(0, len(row.token_ids))]
        assert receipt.tokens == hash_tokens(row.prompt_ids, row.token_ids)
        assert np.isfinite(row.token_logprobs).all()
        assert len(row.token_logprobs) == len(row.token_ids) > 0
    assert whole["usage"]["completion_tokens"] == len(
        next(row for row in captures if row.receipt == receipts[0]).token_ids
    )


def test_a_gateway_moves_it_forward_and_is_told_when_it_cannot_go_back(bucket):
    async def scenario():
        async with replica_on(bucket, hold=True) as (member, session):
            first = await member.held()
            await asyncio.to_thread(publish, bucket, 2)
            assert (await member.held()).version == first.version == 0
            held = await member.load(1, cache="all")
            run, _ = open_run(bucket)
            assert (held.version, held.digest) == (1, read_manifest(bucket, run, 1).digest)
            with pytest.raises(ResyncError, match="only goes forward"):
                await member.load(0, cache="all")
            assert (await member.held()).version == 1
            assert (await member.load(2, cache="all")).version == 2
            for body, status in (({"method": "shutdown"}, 400), ([], 400)):
                url = f"{member.base_url}/collective_rpc"
                headers = {"Authorization": f"Bearer {UPSTREAM}"}
                async with session.post(url, json=body, headers=headers) as answer:
                    assert answer.status == status
            async with session.post(url, json={"method": "deltawire_status"}) as answer:
                assert answer.status == 401

    asyncio.run(scenario())


def test_versions_on_the_way_to_the_one_asked_for_draw_no_token(bucket):
    """A request is under way while the replica moves past version 1."""

    async def scenario():
        async with replica_on(bucket, hold=True) as (member, session):
            await asyncio.to_thread(publish, bucket, 2)
            url = f"{member.base_url}/v1/completions"
            headers = {"Authorization": f"Bearer {UPSTREAM}"}
            ask = {"model": "m", "prompt": "Hi", "max_tokens": 6, "return_token_ids": True}
            drawn = []

            async def answer():
                async with session.post(url, json=ask, headers=headers) as response:
                    body = await response.json()
                    drawn.extend(body["choices"][0]["token_versions"])

            asked = [asyncio.create_task(answer()) for _ in range(24)]
            moved = asyncio.create_task(member.load(2, cache="none"))
            await asyncio.gather(*asked, moved)
            assert (await member.held()).version == 2
            return drawn

    drawn = asyncio.run(scenario())
    assert len(drawn) > 24
    assert set(drawn) <= {0, 2}


def test_without_hold_it_follows_the_run(bucket):
    async def scenario():
        async with replica_on(bucket) as (member, _):
            await asyncio.to_thread(publish, bucket, 2)
            deadline = time.monotonic() + 60
            while (await member.held()).version < 2 and time.monotonic() < deadline:
                await asyncio.sleep(0.02)
            assert (await member.held()).version == 2

    asyncio.run(scenario())


def test_replicas_serve_each_precision_of_a_run_and_follow_it(tmp_path):
    """One on the run, one on its line: each holds the bits of its own versions."""
    train = {
        "versions": 2, "groups_per_step": 1, "max_staleness": 100, "also_publish": ["fp8-block"],
    }  # fmt: skip
    sizes = BuildConfig(hidden_size=64, layers=1, head_size=32, feed_forward_size=64, context=64)
    bucket = start_with_groups(tmp_path, groups=2, train=train, sizes=sizes)
    line = publication_bucket(bucket, "fp8-block")

    async def scenario():
        async with replica_on(bucket) as (exact, _), replica_on(line) as (rounded, _):
            starts = [(await one.held()).version for one in (exact, rounded)]
            await asyncio.to_thread(publish, bucket, 2)
            async with asyncio.timeout(60):
                while True:
                    states = [await one.held() for one in (exact, rounded)]
                    if [one.version for one in states] == [2, 2]:
                        return starts, [one.digest for one in states]
                    await asyncio.sleep(0.05)

    starts, digests = asyncio.run(scenario())
    assert starts == [0, 0]
    expected = [read_manifest(one, read_run(one), 2).digest for one in (bucket, line)]
    assert digests == expected
    assert len(set(digests)) == 2


def test_a_precision_that_the_run_does_not_publish_is_refused(bucket):
    with pytest.raises(InputError, match="does not publish int4-g32") as refused:
        location_of(bucket.url, "int4-g32", ANY)
    assert "it publishes bf16" in refused.value.hint


def test_a_run_without_versions_is_refused(tmp_path, monkeypatch):
    from deltawire.live.gateway import embedded_replica
    from deltawire.store import open_bucket

    monkeypatch.setattr(embedded_replica, "RUN_PATIENCE_S", 0.0)
    process = Process(open_bucket("memory://"), "replica", "worker", supervised=False)
    with pytest.raises(InputError):
        open_replica(process, token=UPSTREAM)

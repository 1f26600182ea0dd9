"""Three versions serve users at once: some users keep an old version, others get the version that
serves, and others a candidate. Engines, replicas, gateway, decisions and bucket are the real ones;
a trainer made the versions."""

import asyncio
from collections import Counter, defaultdict
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import torch
from aiohttp.test_utils import TestServer
from granted_groups import start_with_groups
from live_decider import Decider, in_loop, until
from live_gateway import KEYS, deployment_secret, rows_in

from deltawire.chat.requests import RequestDefaults
from deltawire.export.models import empty_model, fetch_model_files
from deltawire.live.capture.consent import ConsentRule
from deltawire.live.capture.redaction import Redaction
from deltawire.live.gateway import routing
from deltawire.live.gateway.app import LiveCalls
from deltawire.live.gateway.embedded_replica import open_replica
from deltawire.live.gateway.recorder import Recorder, RecorderOptions
from deltawire.rl.trainer.trainer import Trainer
from deltawire.runtime.process import Process, open_run
from deltawire.serving import replica_set
from deltawire.serving.app import build_app
from deltawire.serving.replica_set import ReplicaSet
from deltawire.serving.vllm import VllmReplica
from deltawire.wire.decisions import CANDIDATE, HOLD_BACK
from deltawire.wire.receipts import SERVING, read_receipt

pytestmark = [pytest.mark.drills, pytest.mark.long, pytest.mark.timeout(900)]

TOKEN, ADMIN, UPSTREAM = "sampling", "admin", "upstream"
USERS, SHARE = 90, 0.3
DRAWN = {HOLD_BACK: 0, SERVING: 1, CANDIDATE: 2}
"""The version of each arm."""


class Serving:
    """A gateway over three replicas, and its client."""

    def __init__(self, session, url, members, recorder, run):
        self.session, self.url, self.members = session, url, members
        self.recorder, self.run = recorder, run

    def held(self):
        """The version of each replica, by its own statement."""
        return sorted(m.held.version for m in self.members._members if m.held is not None)

    async def ask(self, user, text):
        """The receipt of an answer, opened."""
        headers = {"Authorization": f"Bearer {TOKEN}", "x-deltawire-user": user}
        body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 4}
        async with self.session.post(self.url, json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            receipt = (await answer.json())["deltawire"]["receipt"]
        return read_receipt(receipt, keys=KEYS, run=self.run)


@asynccontextmanager
async def served(bucket, folder):
    """Three replicas that hold the newest version until they are asked for another one."""
    run, config = open_run(bucket)
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        replicas = []
        for number in range(3):
            process = Process(bucket, f"replica-{number}", "worker", supervised=False)
            replica = await asyncio.to_thread(open_replica, process, token=UPSTREAM, hold=True)
            server = TestServer(replica.app())
            await server.start_server()
            stack.push_async_callback(server.close)
            task = asyncio.create_task(replica.serve())
            stack.push_async_callback(asyncio.wait, [task])
            stack.callback(process.stop)
            replicas.append(VllmReplica(str(server.make_url("/")), session, key=UPSTREAM))
        recorder = Recorder(
            bucket, run, folder, deployment_secret(bucket, run), Redaction(None),
            RecorderOptions(consent=ConsentRule(share=1.0)),
        )  # fmt: skip
        members = ReplicaSet(bucket, run, replicas)
        app = build_app(members, session, token=TOKEN, admin_token=ADMIN)
        LiveCalls(recorder, RequestDefaults.of(config), release=config.live.release).add_to(app)
        gateway = TestServer(app)
        await gateway.start_server()
        stack.push_async_callback(gateway.close)
        await until(lambda: members.ready)
        url = str(gateway.make_url("/v1/chat/completions"))
        yield Serving(session, url, members, recorder, run.id)


def trained(folder):
    """A run with version 0, and what trains two more."""
    bucket = start_with_groups(
        folder, groups=2, train={"versions": 2, "groups_per_step": 1, "max_staleness": 100},
        live={"release": {"metric": "accept"}},
    )  # fmt: skip
    run, config = open_run(bucket)
    with fetch_model_files(bucket, run) as files:
        policy = empty_model(Path(files))
    return bucket, lambda: Trainer(
        Process(bucket, "trainer", "trainer", supervised=False), run, config, policy
    ).loop()


async def random_answers(gateway):
    """Two answers to each user, who are assigned at random while replicas hold all versions."""
    found = defaultdict(list)
    for turn in range(2):
        names = [f"user {number}" for number in range(USERS)]
        asked = [gateway.ask(name, f"mail {turn} of {name}") for name in names]
        for name, receipt in zip(names, await asyncio.gather(*asked), strict=True):
            found[name].append(receipt)
    return found


def test_each_arm_gets_its_version_and_users_return_to_the_old_one(tmp_path, monkeypatch):
    monkeypatch.setattr(routing, "POLL_EVERY_S", 0.1)
    monkeypatch.setattr(replica_set, "POLL_EVERY_S", 0.1)
    torch.set_num_threads(1)
    bucket, train = trained(tmp_path)

    @in_loop
    async def scenario():
        async with served(bucket, tmp_path / "state") as gateway:
            assert gateway.held() == [0, 0, 0]
            await asyncio.to_thread(train)
            decider = Decider(bucket)
            kept = {"hold_back": decider.served(0), "hold_back_share": SHARE}
            decider.decide("serve", 0, **kept)
            decider.decide("promote", 1, **kept)
            decider.decide("gate", 1, 2, **kept)
            decider.decide("canary", 1, 2, share=0.5, salt="s", **kept)
            await until(lambda: gateway.held() == [0, 1, 2] and gateway.members.ready)
            check_arms(await random_answers(gateway))
            assert await asyncio.to_thread(gateway.recorder.uploader.upload)
            captures, _ = rows_in(bucket)
            assert {one.kept for one in captures} == {None, SHARE}
            decider.decide("rollback", 0, 1, **kept)
            await until(lambda: gateway.members.wanted.version == 0)
            # The embedded engine only goes forward: the replica of the old version serves all.
            later = [await gateway.ask(f"user {n}", f"later {n}") for n in range(12)]
            assert {v for one in later for v, _ in one.spans} == {0}
            assert {one.arm for one in later} == {SERVING}

    scenario()


def check_arms(answers):
    """Each arm's answers are of its version, users keep their arms, and shares are as stated."""
    for receipts in answers.values():
        assert {version for one in receipts for version, _ in one.spans} == {DRAWN[receipts[0].arm]}
        assert len({one.arm for one in receipts}) == 1
        assert all(one.propensity < 1 for one in receipts)
    count = Counter(receipts[0].arm for receipts in answers.values())
    for arm, share in ((HOLD_BACK, SHARE), (CANDIDATE, (1 - SHARE) / 2)):
        assert abs(count[arm] - share * USERS) < 4 * (share * (1 - share) * USERS) ** 0.5

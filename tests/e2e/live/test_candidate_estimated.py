"""A gateway serves users from a replica, and the evaluator estimates the next version from what the
gateway logged: engine, gateway, bucket and evaluator are the real ones."""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import numpy as np
import pytest
import torch
from aiohttp.test_utils import TestServer
from granted_groups import start_with_groups
from live_gateway import deployment_secret

from deltawire.chat.requests import RequestDefaults
from deltawire.events import Evaluated
from deltawire.export.models import empty_model, fetch_model_files
from deltawire.live.capture.consent import ConsentRule
from deltawire.live.capture.redaction import Redaction
from deltawire.live.gateway.app import LiveCalls
from deltawire.live.gateway.embedded_replica import open_replica
from deltawire.live.gateway.recorder import Recorder, RecorderOptions
from deltawire.live.release import candidate_estimate
from deltawire.live.release.candidate_estimate import CandidateEstimator
from deltawire.rl.evaluate.evaluator import run_evaluator
from deltawire.rl.trainer.trainer import Trainer
from deltawire.runtime.event_tail import events_of
from deltawire.runtime.process import Process, open_run
from deltawire.serving.app import build_app
from deltawire.serving.replica_set import ReplicaSet
from deltawire.serving.vllm import VllmReplica

TOKEN, ADMIN, UPSTREAM = "sampling", "admin", "upstream"
USERS = 48

pytestmark = pytest.mark.drills


async def serve_users(bucket, folder):
    """Answers `USERS` users from version 0; every other one accepts."""
    process = Process(bucket, "replica", "worker", supervised=False)
    replica = await asyncio.to_thread(open_replica, process, token=UPSTREAM, hold=True)
    server = TestServer(replica.app())
    await server.start_server()
    serving = asyncio.create_task(replica.serve())
    run, config = open_run(bucket)
    options = RecorderOptions(consent=ConsentRule(share=1.0))
    recorder = Recorder(
        bucket, run, folder, deployment_secret(bucket, run), Redaction(None), options
    )
    async with aiohttp.ClientSession() as session:
        members = ReplicaSet(
            bucket, run, [VllmReplica(str(server.make_url("/")), session, key=UPSTREAM)]
        )
        app = build_app(members, session, token=TOKEN, admin_token=ADMIN)
        LiveCalls(recorder, RequestDefaults.of(config), release=config.live.release).add_to(app)
        gateway = TestServer(app)
        await gateway.start_server()
        async with asyncio.timeout(60):
            while not members.ready:
                await asyncio.sleep(0.02)

        async def user(number):
            headers = {"Authorization": f"Bearer {TOKEN}", "x-deltawire-user": f"u{number}"}
            ask = {"model": "m", "messages": [{"role": "user", "content": f"Hi {number}"}]}
            url = str(gateway.make_url("/v1/chat/completions"))
            async with session.post(url, json=ask, headers=headers) as answer:
                receipt = (await answer.json())["deltawire"]["receipt"]
            if number % 2:
                report = {"receipt": receipt, "kind": "accept"}
                url = str(gateway.make_url("/v1/feedback"))
                async with session.post(url, json=report, headers=headers) as answer:
                    assert answer.status == 200

        await asyncio.gather(*(user(number) for number in range(USERS)))
        assert await asyncio.to_thread(recorder.uploader.upload)
        process.stop()
        await serving
        await gateway.close()
        await server.close()


def test_what_a_gateway_logged_estimates_the_version_that_answered_and_the_next(
    tmp_path, monkeypatch
):
    bucket = start_with_groups(
        tmp_path,
        groups=1,
        train={"versions": 1, "groups_per_step": 1, "max_staleness": 100},
        evaluate={"every": 1, "samples": 1},
        task={"heldout": 2},
        live={"release": {"metric": "accept", "outcome_after_s": 60.0}},
    )
    torch.set_num_threads(1)
    run, config = open_run(bucket)
    with fetch_model_files(bucket, run) as folder:
        policy = empty_model(Path(folder))
    trainer = Trainer(Process(bucket, "trainer", "trainer", supervised=False), run, config, policy)
    asyncio.run(serve_users(bucket, tmp_path / "state"))
    trainer.loop()
    # Outcomes count once answers are old enough. On a busy machine a report takes seconds, so the
    # age is long and the evaluator's clock is put forward.
    later = SimpleNamespace(
        time=lambda: time.time() + config.live.release.outcome_after_s, monotonic=time.monotonic
    )
    monkeypatch.setattr(candidate_estimate, "time", later)
    process = Process(bucket, "evaluator", "evaluator", supervised=False)
    run_evaluator(process, CandidateEstimator)
    process.events.flush()
    found = {
        e.version: e.off_policy for e in events_of(bucket, "evaluator") if e.__class__ is Evaluated
    }
    first, last = found[0], found[1]
    for one in (first, last):
        assert one.refused == ""
        assert (one.answers, one.users, one.logged) == (USERS, USERS, 0.5)
        assert abs(one.snips - one.doubly_robust) < 0.3
    assert first.effective == pytest.approx(USERS, abs=0.1), "it is the version that answered"
    assert first.mean_ratio == pytest.approx(1, abs=0.01)
    assert first.snips == pytest.approx(0.5, abs=0.01)
    assert np.isfinite([last.snips_error, last.doubly_robust_error]).all()
    assert last.effective < first.effective - 1e-6, "training moved it away"

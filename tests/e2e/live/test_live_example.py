"""`examples/live/start.sh` starts everything on one machine, from a provider to a canary."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import openai
import pytest
import torch
from aiohttp import web
from documents import ROOT

import deltawire
from deltawire.config import BuildConfig
from deltawire.export.models import save_model
from deltawire.live.feedback.client import FeedbackClient, receipt_of
from deltawire.store import open_bucket
from deltawire.train.build import build_model, byte_tokenizer

pytestmark = pytest.mark.drills
EXAMPLE = ROOT / "examples" / "live"
WORDS = "Ask the front desk."


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture
def provider():
    """The base URL of a plain OpenAI server, which knows one key."""
    started, stopping, loop = threading.Event(), asyncio.Event(), asyncio.new_event_loop()
    place = {}

    async def chat(request):
        assert request.headers["Authorization"] == "Bearer sk-provider"
        assert (await request.json())["model"] == "gpt-x"
        message = {"role": "assistant", "content": WORDS}
        row = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response({"id": "x", "object": "chat.completion", "choices": [row]})

    async def models(request):
        return web.json_response({"data": []})

    async def serve():
        app = web.Application()
        app.router.add_get("/v1/models", models)
        app.router.add_post("/v1/chat/completions", chat)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        place["url"] = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        started.set()
        await stopping.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert started.wait(60)
    try:
        yield place["url"]
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join(60)
        loop.close()


def written_run(place):
    """A run of one version, as a trainer of another kind publishes it."""
    settings = BuildConfig(hidden_size=32, layers=1, head_size=16, feed_forward_size=48, context=96)
    model = build_model(settings, seed=3).to(torch.bfloat16)
    save_model(model, byte_tokenizer(), place / "model")
    bucket = open_bucket(str(place / "run"), create=True)
    tensors = deltawire.tensors_of(model)
    deltawire.open_publisher(bucket, tensors, directory=place / "model").close()
    return place / "run"


def test_everything_starts_and_a_canary_runs_against_the_provider(tmp_path, provider):
    run, state = written_run(tmp_path), tmp_path / "run.live"
    ports = {name: str(free_port()) for name in ("GATEWAY_PORT", "REPLICA_PORT", "PAGE_PORT")}
    environment = {
        **os.environ, **ports, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "UPSTREAM_URL": provider, "UPSTREAM_MODEL": "gpt-x", "OMP_NUM_THREADS": "1",
        "DELTAWIRE_UPSTREAM_KEY_PROVIDER": "sk-provider", "XDG_STATE_HOME": str(tmp_path / "xdg"),
    }  # fmt: skip
    live = ["deltawire", "live"]
    started = subprocess.Popen(
        [str(EXAMPLE / "start.sh"), str(run)], env=environment, text=True,
        stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        while not (line := started.stdout.readline()).startswith("ready: "):
            assert line, "it ended; the logs are on the terminal"
        said = subprocess.run(
            [sys.executable, str(EXAMPLE / "ask.py"), str(state)], env=environment, text=True,
            capture_output=True, check=True, timeout=100,
        )  # fmt: skip
        assert said.stdout.strip() == WORDS
        subprocess.run(
            [*live, "canary", str(run), "--version", "0", "--share", "0.5"], env=environment,
            check=True, timeout=100, capture_output=True,
        )  # fmt: skip
        url, token, admin = ((state / name).read_text() for name in ("url", "token", "admin"))
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=admin, max_retries=0)
        seen, number, until = {}, 0, time.monotonic() + 120
        while seen.keys() != {"serving", "candidate"}:
            assert time.monotonic() < until, seen
            number += 1
            answer = client.chat.completions.create(
                model="support", messages=[{"role": "user", "content": "Hi"}], max_tokens=4,
                user=f"user-{number}", extra_headers={"x-deltawire-capture": "true"},
            )  # fmt: skip
            (revealed,) = answer.model_extra["deltawire"]["revealed"]
            seen[revealed["arm"]] = revealed["versions"]
            FeedbackClient(url, token).send(receipt_of(answer), "thumbs", "up")
        client.close()
        assert [version for version, _ in seen["candidate"]] == [0]
        assert seen["serving"] == []
        found = subprocess.run(
            [*live, "status", str(run), "--json"], env=environment, text=True,
            capture_output=True, check=False, timeout=100,
        )  # fmt: skip
        status = json.loads(found.stdout)
        assert status["serving"]["upstream"] == "provider"
        assert status["candidate"]["version"] == 0
    finally:
        os.kill(started.pid, signal.SIGTERM)
        started.stdout.close()
        started.wait(120)
    for port in ports.values():
        with pytest.raises(urllib.error.URLError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/livez", timeout=5)

"""A mock replica and a bare pass-through, each a process; and the gateway in front of the replica.

python -m benchmarks.live.replica replica DIGEST | proxy URL

The replica states tokens as vLLM does, and writes the time at which it sends each chunk into the
chunk. Times are `time.monotonic`, which processes of one machine share on Linux.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from deltawire.launch.live_secret import SecretPlace, create_secret
from deltawire.store import open_bucket
from deltawire.sync import read_manifest
from deltawire.testing.tiny import start_publisher, start_run, weights

CHUNKS = 16
PROMPT = list(range(64))
TOKEN, ADMIN = "bench-token", "bench-admin-token"
READY_WITHIN_S = 60.0


async def _chat(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    states = bool(body.get("return_token_ids"))
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await answer.prepare(request)
    pace_s = body.get("pace_s", 0.0)
    for place in range(CHUNKS):
        row: dict[str, Any] = {"index": 0, "delta": {"content": f"t={time.monotonic():.7f};"}}
        row["finish_reason"] = "stop" if place == CHUNKS - 1 else None
        event: dict[str, Any] = {
            "id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m",
            "choices": [row],
        }  # fmt: skip
        if states:
            row["token_ids"] = [place]
            row["logprobs"] = {"content": [{"token": "word", "logprob": -0.25, "bytes": None}]}
            if not place:
                event["prompt_token_ids"] = PROMPT
        await answer.write(b"data: %s\n\n" % json.dumps(event).encode())
        if pace_s:
            await asyncio.sleep(pace_s)
    await answer.write(b"data: [DONE]\n\n")
    await answer.write_eof()
    return answer


def _replica(digest: str) -> web.Application:
    async def rpc(_: web.Request) -> web.Response:
        status = {"version": 0, "phase": "serving", "failure": "", "digest": digest}
        return web.json_response({"results": [status]})

    app = web.Application(client_max_size=1 << 24)
    app.router.add_post("/v1/chat/completions", _chat)
    app.router.add_post("/collective_rpc", rpc)
    return app


def _proxy(url: str) -> web.Application:
    app = web.Application(client_max_size=1 << 24)
    key = web.AppKey("session", aiohttp.ClientSession)

    async def passed(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {"Content-Type": "application/json"}
        async with app[key].post(url + request.path, data=body, headers=headers) as upstream:
            answer = web.StreamResponse(
                status=upstream.status, headers={"Content-Type": upstream.headers["Content-Type"]}
            )
            await answer.prepare(request)
            async for chunk in upstream.content.iter_any():
                await answer.write(chunk)
            await answer.write_eof()
            return answer

    async def life(_: web.Application) -> Any:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            app[key] = session
            yield

    app.router.add_post("/v1/chat/completions", passed)
    app.cleanup_ctx.append(life)
    return app


async def _serve(app: web.Application) -> None:
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    print(f"serving on http://127.0.0.1:{runner.addresses[0][1]}", flush=True)  # noqa: T201
    await stopping.wait()
    await runner.cleanup()


class MeasuredProcess:
    """A process that serves at ``url``, with the processor time that it has used."""

    def __init__(self, command: list[str], core: int, **environment: str) -> None:
        self.process = subprocess.Popen(  # noqa: S603 - our own commands
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **environment},
        )
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(self.process.pid, {cores[core % len(cores)]})
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if " on http://" in line:
                self.url = line.rpartition(" on ")[2].strip()
                return
        raise RuntimeError(f"{command[:5]} did not start")

    @property
    def cpu_s(self) -> float:
        """Seconds of processor time, of all its threads."""
        text = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(text[11]) + int(text[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        """Ends the process."""
        self.process.terminate()
        try:
            self.process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()


@contextmanager
def stack(folder: Path) -> Iterator[tuple[MeasuredProcess, MeasuredProcess, MeasuredProcess]]:
    """Serves a replica, a pass-through and a gateway that captures every answer, while it runs."""
    bucket = open_bucket(str(folder / "run"), create=True)
    publisher = start_publisher(bucket)
    publisher.publish(weights(0))
    publisher.close()
    manifest = read_manifest(bucket, start_run(bucket), 0)
    assert manifest is not None
    create_secret(bucket, start_run(bucket), SecretPlace(folder / "secret"))
    own = [sys.executable, "-m", "benchmarks.live.replica"]
    started: list[MeasuredProcess] = []
    try:
        started.append(MeasuredProcess([*own, "replica", manifest.digest], 0))
        started.append(MeasuredProcess([*own, "proxy", started[0].url], 1))
        started.append(
            MeasuredProcess(
                [
                    *(sys.executable, "-m", "deltawire", "gateway", bucket.url, "--port", "0"),
                    *("--replica", started[0].url, "--capture-share", "1"),
                    *("--state", str(folder / "state"), "--secret", str(folder / "secret")),
                ],
                1,
                DELTAWIRE_TOKEN=TOKEN,
                DELTAWIRE_ADMIN_TOKEN=ADMIN,
            )
        )
        yield started[0], started[1], started[2]
    finally:
        for one in reversed(started):
            one.stop()


if __name__ == "__main__":
    asyncio.run(_serve(_replica(sys.argv[2]) if sys.argv[1] == "replica" else _proxy(sys.argv[2])))

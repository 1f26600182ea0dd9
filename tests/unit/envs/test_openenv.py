"""Environments of OpenEnv: options, tools, a server that is started here."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from scripted_agent import called, played

from deltawire.config import TaskConfig
from deltawire.config.machine import POLICY, TRUSTED, URLS
from deltawire.config.tasks import server_urls
from deltawire.envs import open_tasks
from deltawire.envs.registry import require_tasks
from deltawire.errors import InputError

pytest.importorskip("aiohttp")
pytest.importorskip("jsonschema")
ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples/openenv"
PEERS = ROOT / ".venv-openenv/bin/python"


def tasks_of(**options):
    return open_tasks(TaskConfig(environment="openenv", heldout=2, options=options), seed=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either url or server"),
        ({"url": "http://a/", "server": "a:b"}, "either url or server"),
        ({"url": "ftp://a/"}, "task.options of openenv"),
        ({"url": "http://a/", "more": 1}, "task.options of openenv"),
        ({"url": "http://a/"}, "does not let runs reach"),
        ({"server": "some_module:app"}, "module some_module, which this machine does not trust"),
    ],
)
def test_wrong_options_are_refused(monkeypatch, options, message):
    monkeypatch.delenv(TRUSTED, raising=False)
    monkeypatch.delenv(URLS, raising=False)
    with pytest.raises(InputError, match=message):
        tasks_of(**options)
    with pytest.raises(InputError, match=message):
        require_tasks(TaskConfig(environment="openenv", options=options))


def test_seeds_that_are_held_out_are_never_drawn(monkeypatch):
    monkeypatch.setenv(URLS, "http://a/")
    tasks = tasks_of(url="http://a/")
    assert [task.data for task in tasks.heldout()] == [0, 1]
    drawn = {tasks.draw(f"w{n % 2}", n).data for n in range(100)}
    assert len(drawn) == 100
    assert min(drawn) >= 2
    config = TaskConfig(environment="openenv", options={"url": "http://a/"})
    assert list(server_urls(config)) == ["http://a/"]


APP = """
import os

from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute

NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}, "metadata": {}}}


async def schema(request):
    return JSONResponse({"action": {**NUMBER, "required": ["n"]}, "observation": {}})


async def session(socket):
    await socket.accept()
    while (asked := await socket.receive_json())["type"] != "close":
        if asked["data"].get("n") == 99:
            os._exit(1)
        data = {"observation": {"at": os.getpid(), "got": asked["data"]}, "reward": None}
        if asked["type"] == "step":
            data |= {"reward": asked["data"]["n"], "done": True}
        await socket.send_json({"type": "observation", "data": data})


app = Starlette(routes=[Route("/schema", schema), WebSocketRoute("/ws", session)])
"""


def test_a_server_that_is_started_here_serves_all_episodes_and_starts_again(
    tmp_path, monkeypatch, byte_tokenizer
):
    """The model calls the tool whose arguments are an action, and one of its calls ends the
    server."""
    pytest.importorskip("uvicorn")
    pytest.importorskip("starlette")
    (tmp_path / "some_app.py").write_text(APP)
    monkeypatch.setenv(TRUSTED, "some_app")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    tasks = tasks_of(server="some_app:app", reset={"level": 7})

    async def every():
        def one(*said):
            return played(tasks.open(tasks.heldout()[1]), byte_tokenizer, *said)

        right = called("act", n=1)
        first = await asyncio.gather(one("hello", called("act", n="x"), right), one(right))
        return [*first, await one(called("act", n=99)), await one(right)]

    try:
        found = asyncio.run(every())
    finally:
        tasks._server.close()
    causes = [episode.cause for episode, _ in found]
    assert causes[0] == causes[1] == causes[3] == ""
    assert causes[2].startswith("step raised OpenEnvError: step: the connection is lost")
    assert [episode.trajectory.reward for episode, _ in found] == [1.0, 1.0, 0.0, 1.0]
    text = found[0][1]
    assert "Call the tool act once." in text
    assert "'x' is not of type 'integer'" in text
    assert "level" in text
    assert '"seed": 1' in text
    processes = [text.split('"at": ')[1].split(",")[0] for _, text in found]
    assert processes[0] == processes[1] == processes[2] != processes[3]


def test_a_server_ends_with_the_process_that_started_it(tmp_path):
    pytest.importorskip("uvicorn")
    (tmp_path / "slow_app.py").write_text("import time\ntime.sleep(3600)\n")
    text = (
        "from deltawire.envs.openenv import OpenEnvOptions, OpenEnvServer\n"
        "import os\n"
        "server = OpenEnvServer(OpenEnvOptions(server='slow_app:app'))\n"
        "server._start()\n"
        "print(server._process.pid, flush=True)\n"
        "os._exit(0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", text],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    process = Path(f"/proc/{done.stdout.strip()}")
    for _ in range(600):
        if not process.exists() or "State:\tZ" in (process / "status").read_text():
            return
        asyncio.run(asyncio.sleep(0.05))
    raise AssertionError("the server is still there")


@pytest.mark.drills
def test_the_package_openenv_serves_the_example(monkeypatch, tmp_path, byte_tokenizer):
    if not PEERS.exists():
        pytest.skip("no .venv-openenv: sh scripts/peer_environments.sh openenv makes it")
    policy = tmp_path / "policy.toml"
    policy.write_text(f'interpreters = {{ openenv = "{PEERS}" }}')
    monkeypatch.setenv(POLICY, str(policy))
    monkeypatch.setenv(TRUSTED, "guess_server")
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLE))
    tasks = tasks_of(
        server="guess_server:app", action="message", observation="said", probes=["step_count"]
    )

    async def every():
        said = [str(number) for number in range(1, 10)]
        tasks_ = [*tasks.heldout(), *(tasks.draw("w", n) for n in range(4))]
        plays = [played(tasks.open(one), byte_tokenizer, *said, max_turns=12) for one in tasks_]
        wrong = tasks_of(server="guess_server:app", observation="said")
        wrong._server = tasks._server
        call = [called("act", message=5), called("act", message="0")]
        return await asyncio.gather(*plays), await played(
            wrong.open(tasks_[0]), byte_tokenizer, *call, max_turns=3
        )

    try:
        found, (episode, text) = asyncio.run(every())
    finally:
        tasks._server.close()
    for one, told in found:
        assert one.cause == ""
        assert one.trajectory.reward == 1.0
        assert "a number from 1 to 9" in told
        assert one.trajectory.probes["step_count"] == one.trajectory.turns
    assert len({one.trajectory.turns for one, _ in found}) > 1
    assert episode.cause == ""
    assert "5 is not of type 'string'" in text
    assert "larger" in text

"""The page's server: who may ask, what it answers, and what it answers to nonsense."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import time

import pytest
from watched_run import HOSTILE_TASK, write_run

pytest.importorskip("aiohttp")

from aiohttp.test_utils import TestClient, TestServer

from deltawire.cli.main import main
from deltawire.store import open_bucket
from deltawire.sync import read_run
from deltawire.watch.api import WatchedRuns, _lines
from deltawire.watch.group_view import GroupReader
from deltawire.watch.run_reader import RunReader
from deltawire.watch.server import build_app

TOKEN = "t" * 32
VERSIONS = 12


@pytest.fixture(scope="module")
def bucket():
    return write_run(open_bucket("memory://"), versions=VERSIONS, hostile=True)


def ask(bucket, folder, talk, *, wait=True):
    """Run ``talk(get)`` against a server; ``get(path)`` returns a status and a body."""

    async def main():
        reader = RunReader(bucket, folder)
        app = build_app(WatchedRuns([reader]), token=TOKEN)
        async with TestClient(TestServer(app)) as client:

            async def get(path, *, token=TOKEN, host="127.0.0.1:1", raw=False):
                headers = {"Authorization": f"Bearer {token}", "Host": host}
                async with client.get(path, headers=headers) as answer:
                    json = answer.content_type == "application/json" and not raw
                    return answer.status, await (answer.json() if json else answer.text()), answer

            until = time.monotonic() + 60
            while wait and time.monotonic() < until:
                facets = (await get("/api/runs/0/facets"))[1]
                if reader.complete and reader.status and facets["read"] == 4 * VERSIONS:
                    break
                await asyncio.sleep(0.05)
            return await talk(get)

    return asyncio.run(main())


def test_only_the_token_opens_the_figures_and_every_answer_has_the_policy(bucket, tmp_path) -> None:
    async def talk(get):
        for path in ("/api/runs", "/api/runs/0/overview", "/api/compare", "/api/nothing"):
            for token in ("", "x", TOKEN[:-1], TOKEN + "t", "ü"):
                status, body, _ = await get(path, token=token)
                assert (status, body["error"]["code"]) == (401, "invalid_api_key"), path
        for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[::2]:1"):
            for path in ("/", "/api/runs", "/static/main.js"):
                assert (await get(path, host=host))[0] == 421, host
        for host in ("localhost:9", "127.0.0.1", "[::1]:80", "LOCALHOST:1"):
            assert (await get("/api/runs", host=host))[0] == 200, host
        for path, token in (("/", ""), ("/static/main.js", ""), ("/api/runs", ""), ("/x", "")):
            _, _, answer = await get(path, token=token)
            policy = answer.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert "http" not in policy
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert answer.headers["Cache-Control"] == "no-store"

    ask(bucket, tmp_path, talk, wait=False)


def test_static_files_stay_in_their_folder(bucket, tmp_path) -> None:
    async def talk(get):
        for path in ("/", "/run/0/overview", "/compare", "/anything"):
            status, body, _ = await get(path, token="")
            assert status == 200
            assert "<script>" not in body
            assert "http" not in body.replace("http-equiv", "")
        for path in ("/static/../server.py", "/static/..%2fserver.py", "/static//etc/passwd"):
            assert "build_app" not in (await get(path, raw=True))[1], path
        assert "MIT" in (await get("/static/uplot/LICENSE.txt"))[1]

    ask(bucket, tmp_path, talk, wait=False)


def test_every_view_of_a_run(bucket, tmp_path) -> None:
    async def talk(get):
        async def body(path):
            status, found, _ = await get(f"/api/runs/0/{path}")
            assert status == 200, (path, found)
            return found

        overview = await body("overview")
        assert overview["complete"]
        assert overview["bound"] == 4
        assert overview["status"]["version"] == VERSIONS
        figures = {one["name"]: one for one in overview["figures"]}
        assert figures["groups_total"]["value"] == 4 * VERSIONS
        assert figures["heldout"]["text"].endswith("%")
        assert [one["process"] for one in overview["problems"]][:1] == ["worker-c"]
        assert any("killed" in note["text"] and note["bad"] for note in overview["notes"])
        series = await body("series?names=reward,heldout/set/logic,staleness/min,nothing&points=50")
        assert series["versions"] == [*range(1, VERSIONS + 1)]
        assert sorted(series["columns"]) == ["heldout/set/logic", "reward", "staleness/min"]
        assert series["columns"]["heldout/set/logic"][0] is not None
        assert series["columns"]["heldout/set/logic"][1] is None
        few = await body("series?names=reward&points=3&from=2&to=11")
        assert (few["stride"], few["total"]) == (4, 10)
        assert few["versions"] == [3, 7, 11]
        timeline = await body("timeline?columns=60")
        assert timeline["rows"][0]["name"] == "trainer"
        versions = await body("versions?limit=5&below=9")
        assert [one["version"] for one in versions] == [8, 7, 6, 5, 4]
        assert versions[0]["changed_share"] == pytest.approx(0.031, abs=1e-3)
        route = await body("route?held=3&goal=5")
        assert route["error"] == ""
        assert route["bytes"] == sum(step["bytes"] for step in route["steps"])
        assert (await body("route?held=5&goal=5"))["steps"] == []

    ask(bucket, tmp_path, talk)


def test_groups_are_found_read_and_written_as_csv(bucket, tmp_path) -> None:
    async def talk(get):
        status, page, _ = await get("/api/runs/0/groups?family=logic&limit=2&order=oldest")
        assert (status, page["count"], len(page["rows"])) == (200, VERSIONS, 2)
        first = page["rows"][0]
        path = f"/api/runs/0/groups/{first['worker']}/{first['sequence']}"
        _, group, _ = await get(path)
        assert (group["row"]["task"], group["row"]["trained"]) == (first["task"], 1)
        answer = group["answers"][0]
        roles = [message["role"] for message in answer["messages"]]
        assert roles == ["system", "user", "assistant"]
        kinds = [block["kind"] for block in answer["messages"][2]["blocks"]]
        assert kinds == ["thinking", "text"]
        _, tokens, _ = await get(f"{path}/answers/0/tokens")
        assert tokens["total"] == answer["tokens"] == len(tokens["texts"])
        assert sum(tokens["drawn"]) == answer["drawn"]
        assert all(value <= 0 for value in tokens["logprobs"] if value is not None)
        _, experts, _ = await get(f"{path}/answers/0/experts/0")
        assert (experts["experts"], len(experts["layers"])) == (8, 4)
        assert (await get(f"{path}/answers/99/tokens"))[0] == 400
        _, text, _ = await get("/api/runs/0/groups.csv")
        rows = list(csv.DictReader(io.StringIO(text, newline="")))
        assert len(rows) == 4 * VERSIONS
        hostile = next(one["task"] for one in rows if "img" in one["task"])
        assert hostile == HOSTILE_TASK
        assert _lines([["=1+1", "-x", -1.5, None]]) == b"'=1+1,'-x,-1.5,\r\n"

    ask(bucket, tmp_path, talk)


def test_the_text_of_a_tool_call_and_of_characters_that_look_like_markers(bucket, tmp_path) -> None:
    async def talk(get):
        _, page, _ = await get("/api/runs/0/groups?family=tools&limit=1")
        row = page["rows"][0]
        _, group, _ = await get(f"/api/runs/0/groups/{row['worker']}/{row['sequence']}")
        blocks = [
            (message["role"], block["kind"], block["title"])
            for message in group["answers"][0]["messages"]
            for block in message["blocks"]
        ]
        assert ("assistant", "call", "multiply") in blocks
        assert ("user", "answer", "") in blocks

    ask(bucket, tmp_path, talk)


def test_deltas_by_tensor_and_by_layer(bucket, tmp_path) -> None:
    async def talk(get):
        _, change, _ = await get("/api/runs/0/versions/7")
        assert not change["measured"]
        assert change["bytes"] == sum(one["bytes"] for one in change["tensors"])
        _, measured, _ = await get("/api/runs/0/versions/7?measure=1")
        assert measured["measured"]
        changed = [one for one in measured["tensors"] if one["changed"]]
        assert changed
        assert all(one["norm"] > 0 and 0 < one["relative"] < 1 for one in changed)
        assert all(one["changed"] <= one["count"] for one in measured["tensors"])
        for measure in ("bits", "share", "norm"):
            _, layers, _ = await get(f"/api/runs/0/layers?measure={measure}&last=8&count=3")
            assert layers["rows"][0] == "layer 0"
            assert layers["versions"][-1] == 8
            assert all(len(row) == len(layers["versions"]) for row in layers["values"])
        assert (await get("/api/runs/0/versions/0"))[0] == 400

    ask(bucket, tmp_path, talk)


def test_nonsense_is_a_client_error(bucket, tmp_path) -> None:
    async def talk(get):
        for path in (
            "runs/x/overview",
            "runs/0/series?points=1",
            "runs/0/series?from=-1",
            "runs/0/series?from=1e9",
            "runs/0/timeline?from=nan",
            "runs/0/timeline?from=1e300",
            "runs/0/groups?order=upward",
            "runs/0/groups?reward_min=high",
            "runs/0/groups?after=zzz",
            "runs/0/groups/worker-a/-1",
            "runs/0/groups/worker-a/999",
            "runs/0/groups/..%2f..%2frun/1",
            "runs/0/versions/999999",
            "runs/0/layers?measure=weight",
            "runs/0/route",
            "runs/0/groups?version=99999999999999999999",
        ):
            status, body, _ = await get(f"/api/{path}")
            assert status == 400, (path, status, body)
            assert body["error"]["message"]
        for path in ("runs/1/overview", "runs/99999999/overview", "none"):
            assert (await get(f"/api/{path}"))[0] == 404, path

    ask(bucket, tmp_path, talk)


def test_the_terminal_shows_the_same_group(tmp_path, capsys) -> None:
    bucket = write_run(tmp_path / "run", versions=2, hostile=True)
    assert main(["rollouts", str(tmp_path / "run"), "--group", "worker-a/1"]) == 0
    shown = capsys.readouterr().out
    for words in ("thinking", "What is", "assistant", "4 answers"):
        assert words in shown
    assert "\u202e" not in shown
    assert "\x1b" not in shown
    assert main(["rollouts", str(tmp_path / "run"), "--group", "worker-a/1", "--json"]) == 0
    group = json.loads(capsys.readouterr().out)
    expected = GroupReader(bucket, read_run(bucket)).group("worker-a", 1)
    assert group["answers"][0]["messages"][1]["role"] == "user"
    assert len(group["answers"]) == len(expected.answers)
    for name in ("worker-a", "worker-a/x", "/1", "worker-a/99"):
        assert main(["rollouts", str(tmp_path / "run"), "--group", name]) == 2
        assert "group" in capsys.readouterr().err
    arguments = ["rollouts", str(tmp_path / "run"), "--search", "GIVE THE number", "--json"]
    assert main([*arguments, "--count", "3"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert main(["rollouts", str(tmp_path / "run"), "--search", "nobody says this"]) == 0
    assert "no sample matches" in capsys.readouterr().err

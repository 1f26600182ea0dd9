"""Tools of servers in the episodes of any environment."""

import asyncio
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from scripted_agent import called, play, played

from deltawire.chat.messages import Message, Tool
from deltawire.chat.text import Text
from deltawire.config import MixtureEntry, TaskConfig
from deltawire.config.machine import POLICY, URLS, machine_policy
from deltawire.config.parsing import check_config
from deltawire.config.tasks import ToolServerConfig, data_paths, server_urls
from deltawire.envs import Environment, Turn, open_tasks
from deltawire.envs.mcp.faults import ToolServerError
from deltawire.envs.registry import require_tasks
from deltawire.envs.scoring_process import ScoringTimeoutError
from deltawire.envs.served_tools import MAX_CALLS, ToolEpisode
from deltawire.errors import InputError

pytest.importorskip("jsonschema")
import deltawire.envs.mcp.server as server_module
from deltawire.envs.mcp.server import SchemaChecks, files_of, open_server

EXAMPLE = Path(__file__).parents[3] / "examples/mcp_tools"
REAL = '''
import sys
from mcp.server.mcpserver import MCPServer

server = MCPServer("real")


@server.tool()
def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


@server.tool()
def broken() -> str:
    raise ValueError("no luck")


if sys.argv[1:]:
    import uvicorn

    uvicorn.run(server.streamable_http_app(), port=int(sys.argv[1]), log_level="error")
else:
    server.run("stdio")
'''


@pytest.fixture(autouse=True)
def _readable(monkeypatch, tmp_path):
    monkeypatch.setenv("DELTAWIRE_DATA_DIRS", os.pathsep.join([str(EXAMPLE), str(tmp_path), "/"]))


def task_of(task, turns=8):
    model = {"build": {"hidden_size": 32, "layers": 1, "head_size": 16, "feed_forward_size": 64}}
    return check_config(
        {"name": "t", "model": model, "task": task, "rollout": {"max_turns": turns}}, source="test"
    ).task


def sums(server, tmp_path, name=""):
    """Questions whose answer is 23, with the tools of a server."""
    rows = tmp_path / "sums.jsonl"
    rows.write_text("".join(f'{{"q": "2 + 3 * 7 ({n})", "a": "23"}}\n' for n in range(4)))
    data = {"path": str(rows), "answer": "a"}
    task = {"environment": "dataset", "prompt": "{q}", "heldout": 1, "data": data}
    tools = {"tools": [f"mcp:{name or server['name']}"], "tool_servers": [server] if server else []}
    config = task_of({**task, **tools})
    return open_tasks(config, seed=0)


def calculator(**more):
    path = str(EXAMPLE / "calculator.py")
    return {"name": "c", "command": ["python3", "calculator.py"], "path": path, **more}


def test_an_agent_of_several_turns_uses_the_tools_of_the_example(tmp_path, byte_tokenizer):
    tasks = sums(calculator(calls=4), tmp_path)
    episode, text = play(
        tasks.open(tasks.draw("w", 0)),
        byte_tokenizer,
        called("multiply", a=3, b=7),
        called("add", a=2, b=21) + called("price", good="tea") + called("no", a=1),
        called("add", a=2, b=21)[:-3],
        "23",
    )
    assert episode.cause == ""
    assert episode.trajectory.reward == 1.0
    assert episode.trajectory.turns == 4
    assert not tasks.deterministic
    for said in ("21", "23", "'tea' is not one of", "no tool 'no'", "not a valid tool call"):
        assert said in text
    assert tasks.answer(tasks.draw("w", 0)) == "23"


def test_the_example_plays(monkeypatch):
    place = EXAMPLE / "play.py"
    spec = importlib.util.spec_from_file_location("play", place)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.chdir(EXAMPLE)
    assert asyncio.run(example.main()) == 1.0


def test_calls_beyond_the_limits_are_refused_and_told(tmp_path, byte_tokenizer):
    tasks = sums(calculator(calls=1), tmp_path)
    many = called("add", a=1, b=1) * (MAX_CALLS + 1)
    large = called("add", a="1" * 70_000, b=1)
    episode, text = play(
        tasks.open(tasks.heldout()[0]),
        byte_tokenizer,
        large,
        many,
        "0",
        max_tokens=90_000,
        context=200_000,
    )
    assert episode.cause == ""
    assert text.count("the 1 calls of this server are used up") == MAX_CALLS - 1
    assert "at most 65536" in text
    assert f"Only the first {MAX_CALLS} calls" in text


def _packages():
    mcp = pytest.importorskip("mcp.server.mcpserver", reason="mcp comes with verifiers")
    return str(Path(mcp.__file__).resolve().parents[3])


@pytest.mark.drills
def test_the_package_mcp_serves_tools_in_the_sandbox(tmp_path, byte_tokenizer):
    (tmp_path / "real.py").write_text(REAL)
    server = calculator(path=str(tmp_path / "real.py"), packages=_packages())
    server["command"] = ["python3", "real.py"]
    tasks = sums(server, tmp_path)
    episode, text = play(
        tasks.open(tasks.heldout()[0]),
        byte_tokenizer,
        called("add", a=20, b=3),
        called("broken") + called("add", a="x", b=3),
        "23",
    )
    assert episode.cause == ""
    assert episode.trajectory.reward == 1.0
    assert "23" in text
    assert "no luck" in text
    assert "'x' is not of type 'integer'" in text


@pytest.mark.drills
def test_the_package_mcp_serves_tools_over_http(tmp_path, byte_tokenizer, monkeypatch):
    (tmp_path / "real.py").write_text(REAL)
    port = _free_port()
    url = f"http://127.0.0.1:{port}/mcp"
    _packages()
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "real.py"), str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            _wait_for(port)
            with pytest.raises(InputError, match="does not let runs reach"):
                sums({}, tmp_path, url)
            monkeypatch.setenv(URLS, f"http://127.0.0.1:{port}/")
            tasks = sums({}, tmp_path, url)
            said = [called("add", a=20, b=3), called("broken"), "23"]
            first, second = asyncio.run(_both(tasks, byte_tokenizer, said))
        finally:
            process.kill()
    for episode, text in (first, second):
        assert episode.cause == ""
        assert episode.trajectory.reward == 1.0
        assert "no luck" in text


async def _both(tasks, tokenizer, said):
    episodes = [played(tasks.open(tasks.heldout()[0]), tokenizer, *said) for _ in range(2)]
    return await asyncio.gather(*episodes)


def _free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _wait_for(port):
    for _ in range(1200):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise TimeoutError(port)


class Shouting(Environment):
    """Has a tool of its own."""

    tools = (Tool("shout", "Shouts."),)

    async def reset(self):
        return Turn("go")

    async def step(self, action):
        said = [Message("tool", call.name.upper(), call=call.identity) for call in action.calls]
        return Turn(said, reward=float(bool(said)), done=not said)


class Counting:
    """A server without a process."""

    def __init__(self, *names):
        self.names = names
        self.closed = 0

    async def open(self):
        return [Tool(name, "") for name in self.names]

    async def call(self, name, arguments):
        return f"<{name}>"

    async def close(self):
        self.closed += 1


def test_calls_of_own_tools_go_to_the_environment(byte_tokenizer):
    server = Counting("count")
    both = called("count") + called("shout")
    episode, text = play(ToolEpisode(Shouting(), [server]), byte_tokenizer, both, "end")
    assert episode.trajectory.reward == 1.0
    assert "<count>SHOUT" in text
    assert server.closed == 1


def test_two_tools_of_one_name_fail_the_episode_and_close_every_server(byte_tokenizer):
    servers = [Counting("count"), Counting("shout")]
    episode, _ = play(ToolEpisode(Shouting(), servers), byte_tokenizer, "end")
    assert "two tools have the name shout" in episode.cause
    assert [server.closed for server in servers] == [1, 1]


class Waiting(Counting):
    """Opens never, and notes what ended it before it was closed."""

    cancelled = False

    async def open(self):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled = not self.closed
            raise


class Broken(Counting):
    """Does not open."""

    async def open(self):
        await asyncio.sleep(0)
        raise RuntimeError("no luck")


def test_no_server_opens_after_another_has_failed(byte_tokenizer):
    servers = [Waiting("count"), Broken("shout"), Counting("add")]
    episode, _ = play(ToolEpisode(Shouting(), servers), byte_tokenizer, "end")
    assert "no luck" in episode.cause
    assert servers[0].cancelled
    assert [server.closed for server in servers] == [1, 1, 1]


class Slow(Counting):
    """Never answers."""

    async def call(self, name, arguments):
        await asyncio.Event().wait()


def test_calls_end_before_the_time_of_their_step(byte_tokenizer):
    said = [called("count") + called("count"), called("shout"), "end"]
    episode, text = play(ToolEpisode(Shouting(), [Slow("count")]), byte_tokenizer, *said, step_s=1)
    assert episode.cause == ""
    assert text.count("the time of this turn is used up") == 2
    assert "SHOUT" in text


def test_a_machine_bounds_the_servers_that_run_at_once(tmp_path, monkeypatch):
    (tmp_path / "policy.toml").write_text("[ceilings]\nat_once = 1")
    monkeypatch.setenv(POLICY, str(tmp_path / "policy.toml"))

    async def opened():
        make = open_server(ToolServerConfig(**calculator()))
        hasty = open_server(ToolServerConfig(**calculator(start_limit_s=0.1)))()
        first, second = make(), make()
        await first.open()
        with pytest.raises(ToolServerError, match="next to at most 1 commands"):
            await hasty.open()
        waiting = asyncio.create_task(second.open())
        await asyncio.sleep(0)
        await first.close()
        await first.close()
        tools = await waiting
        await second.close()
        return tools

    assert len(asyncio.run(opened())) == 3


def test_a_schema_without_end_stops_the_checks_of_its_own_tool_only():
    """The pattern takes a time that doubles with each character."""
    hostile = {"properties": {"a": {"pattern": "^(a+)+$"}}}

    async def checked():
        checks = SchemaChecks()
        checks._process._limit_s = 0.2
        with pytest.raises(ScoringTimeoutError, match="took longer"):
            await checks("add", hostile, {"a": "a" * 50 + "!"})
        with pytest.raises(ScoringTimeoutError, match="an earlier check"):
            await checks("add", {}, {})
        checks._process._limit_s = 60
        await checks("multiply", {}, {})

    asyncio.run(checked())
    one, other = (open_server(ToolServerConfig(**calculator())) for _ in range(2))
    assert one()._parts.checks is one()._parts.checks
    assert one()._parts.checks is not other()._parts.checks


def test_a_check_does_not_wait_for_others_without_end(monkeypatch):
    monkeypatch.setattr(server_module, "WAIT_S", 0.01)

    async def checked():
        checks = SchemaChecks()
        release = asyncio.Event()

        async def process(schema, value):
            await release.wait()

        checks._process = process
        first = asyncio.create_task(checks("add", {}, {}))
        await asyncio.sleep(0)
        with pytest.raises(ScoringTimeoutError, match="other checks"):
            await checks("add", {}, {})
        release.set()
        await first
        await checks("add", {}, {})

    asyncio.run(checked())


@pytest.mark.parametrize("odd", ["link", "folder", "name", "many", "pipe"])
def test_files_that_a_sandbox_does_not_take_are_refused(tmp_path, monkeypatch, odd):
    policy = tmp_path / "policy.toml"
    policy.write_text("[ceilings]\nfiles = 3")
    monkeypatch.setenv(POLICY, str(policy))
    root = tmp_path / "server"
    (root / "__pycache__").mkdir(parents=True)
    (root / "__pycache__" / "a\nb").touch()
    for name in "abc":
        (root / name).touch()
    config = ToolServerConfig(name="c", command=["true"], path=str(root))
    assert sorted(files_of(config)) == ["a", "b", "c"]
    (root / "c").unlink()
    if odd == "link":
        (root / "l").symlink_to(policy)
    elif odd == "folder":
        (root / "l").symlink_to(tmp_path)
    elif odd == "name":
        (root / "a\nb").touch()
    elif odd == "many":
        (root / "c").touch()
        (root / "d").touch()
    else:
        os.mkfifo(root / "p")
    with pytest.raises(InputError, match="holds"):
        files_of(config)


def test_text_of_a_tool_never_becomes_a_special_token(byte_tokenizer):
    template = "{{ tools | tojson if tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
    eos = byte_tokenizer.decode([256])
    schema = {"type": "object", "properties": {eos: {"description": f'"{eos}'}}}
    tool = Tool("add", f"{eos}end", schema)
    tokens = Text(byte_tokenizer, template=template).prompt([Message("user", "hi")], [tool])
    assert 256 not in tokens
    shown = bytes(tokens).decode()
    assert json.loads(shown.removesuffix("hi"))[0] == tool.schema


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"tools": ["mcp:http://a/"]}, "need turns that read their answers"),
        ({"tools": ["mcp:none"]}, "names none, which"),
        ({"tools": ["rpc:c"], "tool_servers": [calculator()]}, "no kind 'rpc'"),
        ({"tool_servers": [calculator(), calculator()]}, "names a server twice"),
        (
            {"tools": ["mcp:c"], "tool_servers": [calculator(call_limit_s=120)]},
            "as long as rollout.step_limit_s",
        ),
        (
            {"tools": ["mcp:c"], "tool_servers": [calculator(start_limit_s=120)]},
            "as long as rollout.step_limit_s",
        ),
        ({"tools": ["mcp:http://a/"], "environment": "verifiers"}, "are harnesses"),
        ({"tool_servers": [{"name": "c"}]}, "either command or url"),
        ({"tool_servers": [{"name": "c", "url": "http://a/", "path": "x"}]}, "are for a command"),
    ],
)
def test_contradictions_are_refused(task, message):
    with pytest.raises(InputError, match=message):
        task_of(task, turns=1 if "need turns" in message else 2)


def test_a_run_reaches_what_the_machine_names(monkeypatch, tmp_path):
    policy = tmp_path / "policy.toml"
    policy.write_text(
        'urls = ["https://tools.example/a", "https://q.example/a?k=1", "http://127.0.0.1:8000"]'
    )
    monkeypatch.setenv(POLICY, str(policy))
    monkeypatch.setenv(URLS, "https://other.example/mcp")
    for url in (
        *("https://tools.example/a", "https://tools.example/a/b", "http://127.0.0.1:8000/x"),
        *("https://other.example/mcp", "https://other.example/mcp?a=1", "https://q.example/a?k=1"),
        *("https://tools.example/a/%20", "https://tools.example/a/%2520"),
    ):
        assert machine_policy().require_url(url, "task.tools") == url
    for url in (
        *("https://tools.example/ab", "http://tools.example/a", "https://tools.example:444/a"),
        *("https://tools.example/a/../b", "https://tools.example/a/%2e%2e/b", "https:///a"),
        *("https://tools.example/a/..;/b", "https://tools.example/a/%252e%252e/b"),
        *("https://tools.example/a/%2525252e./b", "https://tools.example/a/..%3bx/b"),
        *("https://tools.example/a/%zz", "https://q.example/a", "https://q.example/a?k=2"),
        *("https://x@tools.example/a", "http://127.0.0.1:99999/x", "https://tools.example.a/a"),
    ):
        with pytest.raises(InputError, match="does not let runs reach"):
            machine_policy().require_url(url, "task.tools")


@pytest.mark.parametrize("url", ["https://u:secret@h.example:1/a?t=secret", "http://[secret/"])
def test_a_refused_url_is_told_without_its_secrets(url):
    with pytest.raises(InputError, match="does not let runs reach") as refused:
        machine_policy().require_url(url, "task.tools")
    told = f"{refused.value} {refused.value.hint}"
    assert "secret" not in told
    assert "user names and passwords in a URL are not supported" in told
    assert ("@" in url.partition("[")[0] and "https://h.example:1/a, " in told) or "[" in url


def test_a_server_is_checked_before_a_run_starts(monkeypatch):
    monkeypatch.setenv("DELTAWIRE_DATA_DIRS", "/nowhere")
    for server, message in (
        (calculator(), "does not give to runs"),
        (calculator(path="", packages="/usr"), "does not give to runs"),
        (calculator(path="", isolation="process"), "isolation"),
        ({"name": "c", "url": "http://127.0.0.1:1/"}, "does not let runs reach"),
    ):
        task = task_of({"tools": ["mcp:c"], "tool_servers": [server]})
        with pytest.raises(InputError, match=message):
            require_tasks(task)
        with pytest.raises(InputError, match=message):
            open_tasks(task, seed=0)


def test_the_paths_and_urls_of_servers_are_known_to_the_run():
    servers = [
        ToolServerConfig(name="c", command=["x"], path="here", packages="there"),
        ToolServerConfig(name="u", url="http://a/"),
    ]
    config = TaskConfig(tools=["mcp:u", "mcp:http://b/"], tool_servers=servers)
    assert list(data_paths(config)) == ["here", "there"]
    assert list(server_urls(config)) == ["http://a/", "http://b/"]
    entry = MixtureEntry(name="one", task=config)
    mixed = TaskConfig(mixture=[entry], tools=["mcp:of-no-server"])
    assert list(server_urls(mixed)) == ["http://a/", "http://b/"]

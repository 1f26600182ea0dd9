"""Agents in workspaces: what they do takes effect, what they do wrong costs, the end is graded."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from deltawire.chat.messages import ToolCall
from deltawire.chat.text import Text
from deltawire.config import TaskConfig, parse_config
from deltawire.engines.base import Completion
from deltawire.envs.base import Action
from deltawire.envs.registry import open_tasks
from deltawire.envs.sandbox.box import Sandbox
from deltawire.envs.workspace import Workspace, WorkspaceSettings, WorkspaceTasks, problem
from deltawire.errors import InputError
from deltawire.rl.rollout.episode import run_episode
from deltawire.rl.rollout.episode_types import EpisodeLimits, group_of
from deltawire.wire.rollouts import decode_group, encode_group

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")

TASK = problem("episode/2")
PATH, WRONG, RIGHT = TASK.repair
REPAIR = ToolCall("edit_file", {"path": PATH, "old": WRONG, "new": RIGHT})
SUBMIT = ToolCall("submit", {})


def opened(**options):
    return Workspace(TASK, Sandbox(), WorkspaceSettings(**options))


def act(workspace, *turns):
    """Play turns, each a list of calls or an action; the answers and the reward of each."""

    async def play():
        found = []
        await workspace.reset()
        for calls in turns:
            action = calls if isinstance(calls, Action) else Action("", calls=tuple(calls))
            found.append(await workspace.step(action))
        return found

    return asyncio.run(play())


def said(turn):
    return "".join(message.content for message in turn.messages)


class Scripted:
    """A sampler that writes the scripted texts."""

    def __init__(self, *script):
        self.script = list(script)
        self.prompts = []

    async def generate(self, prompt, sampling, *, on_token=None):
        self.prompts.append(bytes(token for token in prompt if token < 256))
        tokens = [*self.script[len(self.prompts) - 1].encode(), 256]
        return Completion(tokens, [-0.5] * len(tokens), [1] * len(tokens), "stop")


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_a_scripted_policy_solves_it_token_by_token(byte_tokenizer):
    name = PATH.split("/")[1].removesuffix(".py")
    engine = Scripted(
        "I look around. " + call("list_files"),
        call("run", command="python -m unittest -q"),
        call("search", text=f"def {name}") + call("read_file", path=PATH),
        call("edit_file", path=PATH, old=WRONG, new=RIGHT),
        call("run", command="python -m unittest -q"),
        "All pass now. " + call("submit"),
    )
    tasks = WorkspaceTasks(TaskConfig(environment="workspace", heldout=1), seed=0)
    workspace = Workspace(TASK, tasks.sandbox, tasks.settings)
    episode = asyncio.run(
        run_episode(
            engine,
            workspace,
            Text(byte_tokenizer),
            temperature=1.0,
            limits=EpisodeLimits(max_tokens=4000, max_turns=50, context=100_000),
        )
    )
    assert not episode.cause
    assert episode.solved
    trajectory = episode.trajectory
    assert trajectory.reward == 1.0
    assert trajectory.turns == 6
    assert trajectory.probes == {
        "heldout_tests": 1.0,
        "alarm.tests_edited": 0.0,
        "alarm.broken_calls": 0.0,
        "alarm.nothing_done": 0.0,
    }
    assert PATH.encode() in engine.prompts[1]
    assert b"FAILED" in engine.prompts[2]
    assert f"{PATH}:1: def {name}".encode() in engine.prompts[3]
    assert b"\nOK\n\n(exit code 0)" in engine.prompts[5]
    group = group_of("w", "n", tasks.draw("w", 0), 1.0, [episode])
    decoded = decode_group(encode_group(group), run="r", key="k")
    assert decoded.trajectories[0].probes == trajectory.probes
    assert decoded.family == tasks.draw("w", 0).family


def test_all_fifty_turns_can_be_used_and_the_last_one_is_graded():
    workspace = opened()
    look = [ToolCall("read_file", {"path": PATH})]
    turns = act(workspace, *[look] * 48, [REPAIR], look)
    assert [turn.done for turn in turns] == [False] * 49 + [True]
    assert sum(turn.reward for turn in turns) == 1.0
    assert workspace.solved(1.0)


def test_an_unrepaired_package_earns_nothing_and_is_not_solved():
    workspace = opened()
    (end,) = act(workspace, [SUBMIT])
    assert (end.reward, end.done) == (0.0, True)
    assert not workspace.solved(1.0)
    assert asyncio.run(workspace.probes())["heldout_tests"] == 0.0


def test_broken_calls_cost_up_to_half_and_are_answered():
    workspace = opened(broken_call_cost=0.1)
    broken = Action("", broken=("<tool_call>{oops",))
    unknown = [ToolCall("fly", {})]
    turns = act(workspace, broken, unknown, broken, unknown, broken, unknown, [REPAIR], [SUBMIT])
    assert [turn.reward for turn in turns[:6]] == pytest.approx([-0.1] * 5 + [0])
    assert "not a valid tool call: <tool_call>{oops" in said(turns[0])
    assert "there is no tool 'fly'" in said(turns[1])
    assert turns[-1].reward == 1.0
    assert workspace.solved(0.5)
    assert asyncio.run(workspace.probes())["alarm.broken_calls"] == 1.0


@pytest.mark.parametrize(
    ("name", "arguments", "answer"),
    [
        ("read_file", {}, "path must be a text"),
        ("read_file", {"path": "/etc/passwd"}, "there is no file '/etc/passwd'"),
        ("read_file", {"path": PATH, "first": 0}, "line number"),
        ("read_file", {"path": PATH, "first": True}, "line number"),
        ("search", {"text": ""}, "1 to 200"),
        ("edit_file", {"path": PATH, "old": "no such text", "new": ""}, "occurs 0 times"),
        ("edit_file", {"path": PATH, "old": "", "new": "x"}, "exists already"),
        ("edit_file", {"path": "../x", "old": "", "new": "x"}, "cannot be a file"),
        ("edit_file", {"path": f"{PATH}/x", "old": "", "new": "x"}, "cannot be a file"),
        ("edit_file", {"path": TASK.package, "old": "", "new": "x"}, "is a folder"),
        ("edit_file", {"path": "\ud800", "old": "", "new": "x"}, "cannot be a file"),
        ("edit_file", {"path": "x", "old": "", "new": "\ud800"}, "half a character"),
        ("edit_file", {"path": "x", "old": "", "new": "x" * (17 << 20)}, "is full"),
        ("run", {"command": 5}, "command must be a text"),
        ("run", {"command": "echo \0"}, "cannot be run"),
    ],
)
def test_what_is_asked_wrongly_is_answered_not_raised(name, arguments, answer):
    turn, listed = act(opened(), [ToolCall(name, arguments)], [ToolCall("list_files", {})])
    assert answer in said(turn)
    assert said(turn).startswith("error: ")
    assert len(said(listed).splitlines()) == len(TASK.files)


def test_files_of_a_command_persist_and_its_damage_is_reported():
    turns = act(
        opened(wall_s=1.0, output_kib=1),
        [ToolCall("run", {"command": "echo 7 > note; ln -s /etc out; exit 4"})],
        [ToolCall("read_file", {"path": "note"}), ToolCall("read_file", {"path": "out/passwd"})],
        [ToolCall("run", {"command": "sleep 60"})],
        [ToolCall("run", {"command": "seq 1 2000"})],
    )
    assert "(exit code 4)" in said(turns[0])
    assert "1\t7" in said(turns[1])
    assert "there is no file 'out/passwd'" in said(turns[1])
    assert "exceeded the limit of time" in said(turns[2])
    assert len(said(turns[3])) < 1200
    assert "only part of the 8893 bytes" in said(turns[3])


def _new(path):
    return ToolCall("edit_file", {"path": path, "old": "", "new": "x"})


@pytest.mark.parametrize(
    "calls",
    [
        [_new("/".join([f"d{n}", *map(str, range(29)), "f"])) for n in range(6)],
        [ToolCall("run", {"command": "head -c 900000 /dev/zero > big"})]
        + [_new(f"f{n}") for n in range(90)],
    ],
    ids=["folders", "pages"],
)
def test_no_agent_can_fill_its_workspace_beyond_what_can_be_graded(calls):
    """An episode that fails is not trained on: it would be the way out of earning nothing."""
    workspace = opened(files=100, disk_mib=1)
    filled, ended = act(workspace, calls, [SUBMIT])
    assert "error: the workspace is full" in said(filled)
    assert (ended.done, ended.reward) == (True, 0.0)


def test_rollouts_never_meet():
    """Two episodes of one task, in turn and at once: each has its own files."""
    first, second = opened(), opened()
    act(first, [ToolCall("run", {"command": "echo mine > /workspace/note; echo x > /tmp/y"})])
    (turn,) = act(second, [ToolCall("run", {"command": "ls /tmp /workspace"})])
    assert "note" not in said(turn)
    assert "y" not in said(turn).split()
    assert "note" in first.files
    assert "note" not in TASK.files


def test_edited_tests_are_distinguished_from_added_tests():
    test = next(path for path in TASK.files if path.startswith("tests/test_"))
    added = ToolCall("edit_file", {"path": "tests/test_more.py", "old": "", "new": "x = 1\n"})
    emptied = ToolCall("run", {"command": f"echo > {test}"})
    for calls, edited in (([added], 0.0), ([emptied], 1.0)):
        workspace = opened()
        act(workspace, [*calls, REPAIR], [SUBMIT])
        assert asyncio.run(workspace.probes())["alarm.tests_edited"] == edited


def _byte_model(text, prompt, target, steps):
    """A small model, trained to write ``target`` after ``prompt``."""
    import torch

    from deltawire.config import BuildConfig
    from deltawire.train.build import build_model

    sizes = BuildConfig(hidden_size=48, layers=2, head_size=24, feed_forward_size=96, context=2048)
    torch.manual_seed(0)
    model = build_model(sizes, seed=0).float().train()
    tokens = torch.tensor([[*text.prompt(prompt), *text.encode(target), 256]])
    start = len(text.prompt(prompt))
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    for _ in range(steps):
        logits = model(tokens).logits[0, start - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits, tokens[0, start:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param(0, id="untaught"),
        pytest.param(150, id="taught to look", marks=[pytest.mark.drills, pytest.mark.long]),
    ],
)
def test_a_tiny_model_acts_in_it(byte_tokenizer, steps):
    from deltawire.engines.transformers import TransformersEngine

    text = Text(byte_tokenizer)
    target = call("list_files")
    workspace = opened(turns=4, idle_turns=2)
    model = _byte_model(text, workspace.prompt(), target, steps)
    engine = TransformersEngine(model, stop_tokens={256}, slots=2, capacity=2048, seed=1, version=5)

    async def play():
        episode = asyncio.create_task(
            run_episode(
                engine,
                workspace,
                text,
                temperature=0.3,
                limits=EpisodeLimits(max_tokens=80, max_turns=4, context=2000),
            )
        )
        while not episode.done():
            engine.step()
            await asyncio.sleep(0)
        return episode.result()

    episode = asyncio.run(play())
    assert not episode.cause
    trajectory = episode.trajectory
    assert trajectory.turns >= 2
    assert trajectory.reward <= 0
    assert trajectory.probes["heldout_tests"] == 0.0
    assert np.isfinite(trajectory.logprobs_T).all()
    heard = bytes(int(t) for t in trajectory.tokens_T[trajectory.mask_T == 0] if t < 256)
    listed = b"README.md (" in heard
    assert listed == (steps > 0)


def test_the_example_solves_its_task():
    example = Path(__file__).parents[4] / "examples/workspace/solve.py"
    done = subprocess.run(
        [sys.executable, example, "4"], capture_output=True, text=True, check=True, timeout=200
    )
    assert "FAILED" in done.stdout
    assert "reward 1, probes {'heldout_tests': 1.0" in done.stdout


def test_a_configuration_names_it():
    config = parse_config(
        {"name": "w", "task": {"environment": "workspace", "options": {"turns": 7}, "heldout": 2}},
        source="test",
    )
    tasks = open_tasks(config.task, seed=config.seed)
    assert isinstance(tasks, WorkspaceTasks)
    assert tasks.open(tasks.draw("w", 0)).settings.turns == 7


def test_a_missing_sandbox_is_reported_before_the_first_episode(monkeypatch):
    """By the worker's call, inside its event loop; a good one is tried once only."""
    tasks = WorkspaceTasks(TaskConfig(environment="workspace", heldout=1), seed=0)
    task = tasks.draw("w", 0)

    async def opened_inside():
        return tasks.open(task)

    asyncio.run(opened_inside())
    tried = []
    monkeypatch.setattr(Sandbox, "check", tried.append)
    asyncio.run(opened_inside())
    assert not tried

    async def refuse(self):
        raise InputError("this machine gives no sandbox: unshare")

    monkeypatch.setattr(Sandbox, "check", refuse)
    tasks = WorkspaceTasks(TaskConfig(environment="workspace", heldout=1), seed=0)
    with pytest.raises(InputError, match="gives no sandbox"):
        asyncio.run(opened_inside())

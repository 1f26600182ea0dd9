"""The example of an agent that must call a tool before it answers."""

import asyncio
import importlib.util
from pathlib import Path

import pytest

from deltawire.chat.messages import ToolCall
from deltawire.config import TaskConfig, load_config
from deltawire.envs import Action

EXAMPLES = Path(__file__).parents[3] / "examples/real"


@pytest.fixture(scope="module")
def till():
    spec = importlib.util.spec_from_file_location("till_example", EXAMPLES / "till.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def played(episode, *actions):
    async def play():
        await episode.reset()
        return [await episode.step(action) for action in actions]

    return asyncio.run(play())


def asking(item, name="price"):
    return Action("", calls=(ToolCall(name, {"item": item}, "c1"),))


def said(content):
    return Action(content, content)


def test_a_total_counts_only_after_its_price_was_asked(till):
    def open_one():
        return till.Till("tea", 7, 2)

    asked, total = played(open_one(), asking("tea"), said("That is 9."))
    assert [one.content for one in asked.messages] == ["7"]
    assert total.done
    assert open_one().solved(asked.reward + total.reward)
    assert [one.reward for one in played(open_one(), said("9"))] == [0.0], "a guess"
    assert played(open_one(), asking("tea"), said("8"))[1].reward == 0.0
    again = played(open_one(), asking("tea"), asking("tea"))
    assert [one.reward for one in again] == [0.3, 0.0], "asking twice earns once"


def test_calls_of_something_else_earn_nothing_and_broken_ones_cost(till):
    def open_one():
        return till.Till("tea", 7, 2)

    wrong = played(open_one(), asking("wine"), asking("tea", "prices"))
    assert [(one.reward, one.done) for one in wrong] == [(0.0, False)] * 2
    (broken,) = played(open_one(), Action("<tool_call>", broken=("<tool_call>",)))
    assert (broken.reward, broken.done) == (-0.1, False)


def test_customers_are_the_same_in_every_process(till):
    tasks = till.TillTasks(TaskConfig(heldout=3), seed=4)
    same = till.TillTasks(TaskConfig(heldout=3), seed=4)
    assert tasks.draw("run", 8) == same.draw("run", 8)
    names = {one.identity for one in tasks.heldout()}
    assert len(names) == 3
    assert not names & {tasks.draw("run", index).identity for index in range(9)}


@pytest.mark.parametrize("name", ["sums", "lora", "till"])
def test_the_files_are_configurations(name):
    assert load_config(EXAMPLES / f"{name}.toml").name.startswith("real")

"""A scripted agent repairs a workspace; prints each turn of the environment.

python examples/workspace/solve.py [SEED]
"""

import asyncio
import functools
import sys

from deltawire.chat.messages import ToolCall
from deltawire.config import TaskConfig
from deltawire.envs.base import Action
from deltawire.envs.workspace import WorkspaceTasks

say = functools.partial(print, flush=True)


async def main(seed: int) -> None:
    """Play the first task of the seed."""
    tasks = WorkspaceTasks(TaskConfig(environment="workspace", heldout=10), seed=seed)
    task = tasks.draw("example", 0)
    workspace = tasks.open(task)
    path, wrong, right = workspace.problem.repair  # A model would have to find these.
    turn = await workspace.reset()
    say(f"{task.identity}, family {task.family}\n\n{turn.messages[0].content}")
    for call in (
        ToolCall("list_files", {}),
        ToolCall("run", {"command": "python -m unittest -q 2>&1 | tail -5"}),
        ToolCall("read_file", {"path": path}),
        ToolCall("edit_file", {"path": path, "old": wrong, "new": right}),
        ToolCall("run", {"command": "python -m unittest -q"}),
        ToolCall("submit", {}),
    ):
        turn = await workspace.step(Action("", calls=(call,)))
        say(f"--- {call.name}\n{''.join(message.content for message in turn.messages)}")
    say(f"reward {turn.reward:g}, probes {dict(await workspace.probes())}")
    await workspace.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 0))

"""A scripted agent answers a question with the tools of calculator.py; prints each turn.

From this folder: python play.py
"""

import asyncio
import functools
from pathlib import Path

from deltawire.chat.messages import ToolCall
from deltawire.envs import open_tasks
from deltawire.envs.base import Action
from deltawire.launch.processes import read_config

say = functools.partial(print, flush=True)


async def main() -> float:
    """Plays the first held-out task; returns the reward."""
    config = read_config(Path("run.toml"))
    tasks = open_tasks(config.task, seed=config.seed)
    task = tasks.heldout()[0]
    episode = tasks.open(task)
    try:
        turn = await episode.reset()
        say("tools:", ", ".join(tool.name for tool in episode.tools))
        say(turn.messages[0].content)
        words = task.data["question"].split()
        count, good = int(words[2]), words[5].strip(",")
        answer = 0
        for name, arguments in (
            ("price", {"good": good}),
            ("multiply", {"a": count}),
            ("add", {"a": 9}),
        ):
            given = arguments if name == "price" else {**arguments, "b": answer}
            turn = await episode.step(Action("", calls=(ToolCall(name, given),)))
            answer = int(turn.messages[0].content)
            say(f"{name} {given}: {answer}")
        turn = await episode.step(Action(str(answer)))
        say(f"reward {turn.reward:g}")
    finally:
        await episode.close()
    return turn.reward


if __name__ == "__main__":
    asyncio.run(main())

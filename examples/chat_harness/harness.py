"""A harness for any OpenAI-compatible server; deltawire records its requests and answers."""

from typing import Any

import openai

from deltawire.config import TaskConfig
from deltawire.envs import TaskSource
from deltawire.envs.chat import ChatTasks

LETTERS = "abcdefghij"


async def say_again(base_url: str, api_key: str, task: dict[str, Any]) -> float:
    """Ask for a letter, twice if necessary; the reward is its share of the answer."""
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages: list[Any] = [{"role": "user", "content": f"Say {task['letter']}: "}]
    reward = 0.0
    async with client:
        for _ in range(2):
            answer = await client.chat.completions.create(model="policy", messages=messages)
            said = answer.choices[0].message.content or ""
            reward = said.count(task["letter"]) / max(1, len(said))
            if reward == 1.0:
                break
            messages += [answer.choices[0].message, {"role": "user", "content": " Again: "}]
    return reward


def tasks(config: TaskConfig, *, seed: int) -> TaskSource:
    """All letters, some of them held out."""
    every = [{"id": f"{n}{letter}", "letter": letter} for n in range(10) for letter in LETTERS]
    return ChatTasks(say_again, every[config.heldout :], heldout=every[: config.heldout], seed=seed)

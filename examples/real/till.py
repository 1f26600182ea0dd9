"""The environment of examples/real/till.toml: a clerk who must ask for a price before adding.

A conversation has up to three turns. Prices are random, so the model cannot know one: it has to
call `price`, read the answer, and say the total. A call earns something, so that it is learned
first; a right total earns the rest. The model's chat template has no place for tools, so two
examples in the prompt show the call: with them it makes two of three calls right at first.
"""

from __future__ import annotations

import random
import re
from typing import Any

from deltawire.config import TaskConfig
from deltawire.envs import Action, Environment, Message, Task, Turn

SYSTEM = (
    "You are a clerk. Ask for the price of a thing by a call of the tool price, then answer with "
    "the total only."
)
GOODS = ("tea", "bread", "milk", "rice", "salt", "soap", "honey", "oil")
ASKED, BROKEN = 0.3, -0.1
"""The reward of the first right call of an episode, and of a call that cannot be read."""


def question(item: str, delivery: int) -> Message:
    """Returns what a customer asks."""
    return Message("user", f"What do {item} and a delivery for {delivery} cost together?")


def example(item: str, price: int, delivery: int) -> list[Message]:
    """Returns a conversation that goes well."""
    call = f'<tool_call>{{"name": "price", "arguments": {{"item": "{item}"}}}}</tool_call>'
    return [
        question(item, delivery),
        Message("assistant", call),
        Message("tool", str(price)),
        Message("assistant", str(price + delivery)),
    ]


class Till(Environment):
    """One customer: the price of one thing, plus a delivery that costs a known amount."""

    def __init__(self, item: str, price: int, delivery: int) -> None:
        self._item, self._price, self._delivery = item, price, delivery
        self._asked = False

    async def reset(self) -> Turn:
        """Says what the customer wants."""
        return Turn(
            [
                Message("system", SYSTEM),
                *example("wine", 6, 2),
                *example("cheese", 3, 4),
                question(self._item, self._delivery),
            ]
        )

    async def step(self, action: Action) -> Turn:
        """Answers a call, or scores a total."""
        if action.calls:
            call = action.calls[0]
            right = call.name == "price" and call.arguments.get("item") == self._item
            answer = str(self._price) if right else "There is no such thing."
            earned = ASKED if right and not self._asked else 0.0
            self._asked |= right
            return Turn([Message("tool", answer, call=call.identity)], reward=earned)
        if action.broken:
            return Turn("That was not a call of a tool.", reward=BROKEN)
        numbers = re.findall(r"\d+", action.content)
        right = self._asked and bool(numbers) and int(numbers[-1]) == self._price + self._delivery
        return Turn(reward=1.0 - ASKED if right else 0.0, done=True)


class TillTasks:
    """Draws customers; the same arguments give the same ones."""

    deterministic = True

    def __init__(self, config: TaskConfig, *, seed: int) -> None:
        self._seed, self._heldout = seed, config.heldout

    def _task(self, place: str) -> Task:
        rng = random.Random(f"{self._seed} {place}")
        item, price, delivery = rng.choice(GOODS), rng.randint(1, 9), rng.randint(1, 5)
        return Task(place, {"item": item, "price": price, "delivery": delivery})

    def draw(self, stream: str, index: int) -> Task:
        """Returns the customer at a place of a stream."""
        return self._task(f"{stream}/{index}")

    def heldout(self) -> list[Task]:
        """Returns the customers that are only evaluated on."""
        return [self._task(f"heldout/{index}") for index in range(self._heldout)]

    def open(self, task: Task) -> Environment:
        """Opens the conversation with a customer."""
        data: dict[str, Any] = task.data
        return Till(**data)

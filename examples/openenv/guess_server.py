"""A server of OpenEnv: the model guesses a number from 1 to 9."""

import random
from typing import Any

from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Guess(Action):
    """Holds the model's text."""

    message: str


class Answer(Observation):
    """Holds the environment's text."""

    said: str


class GuessEnvironment(Environment):
    """One session: the reward is 1 for the right number."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._number = 0
        self._state = State()

    def reset(self, seed: int | None = None, **_: Any) -> Answer:
        """Chooses the number by the seed."""
        self._number = random.Random(seed).randint(1, 9)
        self._state = State()
        return Answer(said="I think of a number from 1 to 9.\n")

    def step(self, action: Guess, **_: Any) -> Answer:
        """Compares a guess with the number."""
        self._state.step_count += 1
        guess = action.message.strip()
        if guess == str(self._number):
            return Answer(said="right\n", reward=1.0, done=True)
        if not guess.isdecimal():
            return Answer(said="Say a number.\n")
        return Answer(said="smaller\n" if int(guess) > self._number else "larger\n")

    @property
    def state(self) -> State:
        """The number of guesses."""
        return self._state


app = create_app(GuessEnvironment, Guess, Answer, env_name="guess", max_concurrent_envs=64)

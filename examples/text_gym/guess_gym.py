"""A text environment of Gymnasium: the model guesses a number from 0 to 8."""

from typing import Any

import gymnasium


class Guess(gymnasium.Env[str, int]):
    """The reward is 1 for the right number; each observation is a text."""

    action_space = gymnasium.spaces.Discrete(9)
    observation_space = gymnasium.spaces.Text(100)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Chooses the number by the seed."""
        super().reset(seed=seed, options=options)
        self._number = int(self.np_random.integers(9))
        self._guesses = 0
        return "I think of a number from 0 to 8.\n", {}

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Compares a guess with the number."""
        self._guesses += 1
        right = action == self._number
        said = "right" if right else "smaller" if action > self._number else "larger"
        return f"{said}\n", float(right), right, False, {"guesses": self._guesses}


gymnasium.register("Guess-v0", entry_point=Guess)

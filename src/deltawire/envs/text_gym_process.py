"""Plays one episode of a text environment; the process of `deltawire.envs.text_gym`.

It reads requests from stdin and writes answers to stdout, one JSON text a line. It runs with
whatever interpreter has the environment's package, so it imports the standard library only.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from typing import Any


class _SkyRL:
    """Follows SkyRL-Gym: ``init`` and ``step``, whose observations are messages."""

    def __init__(self, asked: dict[str, Any]) -> None:
        make = importlib.import_module("skyrl_gym").make
        self.env = make(asked["id"], env_config=asked["settings"], extras=asked["row"])

    def start(self, asked: dict[str, Any]) -> dict[str, Any]:
        prompt, metadata = self.env.init(asked["prompt"])
        return {"said": prompt, "metadata": metadata}

    def step(self, text: str) -> dict[str, Any]:
        found = self.env.step(text)
        return {
            "said": found["observations"],
            "reward": found["reward"],
            "done": found["done"],
            "metadata": found.get("metadata"),
        }


class _Gymnasium:
    """Follows Gymnasium: ``reset`` and ``step``; an observation is a text, or shown as one."""

    def __init__(self, asked: dict[str, Any]) -> None:
        make = importlib.import_module("gymnasium").make
        self.env = make(asked["id"], **asked["settings"])

    def start(self, asked: dict[str, Any]) -> dict[str, Any]:
        observation, metadata = self.env.reset(seed=asked["seed"])
        return {"said": [*asked["prompt"], _user(observation)], "metadata": metadata}

    def step(self, text: str) -> dict[str, Any]:
        try:
            action = self._action(text)
        except ValueError:
            return {"said": [_user(f"error: {text[:200]!r} is no action")]}
        observation, reward, terminated, truncated, metadata = self.env.step(action)
        return {
            "said": [_user(observation)],
            "reward": reward,
            "done": bool(terminated or truncated),
            "metadata": metadata,
        }

    def _action(self, text: str) -> Any:
        """A number where the actions are numbered, else the text."""
        space = self.env.action_space
        if not hasattr(space, "n"):
            return text
        action = int(text)
        if not space.contains(action):
            raise ValueError
        return action


KINDS = {"skyrl_gym": _SkyRL, "gymnasium": _Gymnasium}


def _user(observation: Any) -> dict[str, str]:
    return {"role": "user", "content": f"{observation}"}


def _as_json(value: Any) -> Any:
    """A NumPy number as Python's; anything else that JSON cannot hold as text."""
    return value.item() if hasattr(value, "item") else str(value)


def main() -> None:
    """Answers requests until there are no more."""
    out = os.fdopen(os.dup(1), "wb")
    # The environment can neither print an answer nor read a request.
    requests = os.fdopen(os.dup(0), "rb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for handle in (0, 1, 2):
        os.dup2(nowhere, handle)
    episode: Any = None
    for line in requests:
        asked = json.loads(line)
        try:
            if episode is None:
                for module in asked["modules"]:
                    importlib.import_module(module)
                with contextlib.suppress(ImportError, ValueError, OSError):
                    import resource

                    most = asked["memory_bytes"]
                    resource.setrlimit(resource.RLIMIT_AS, (most, most))
                    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                episode = KINDS[asked["kind"]](asked)
                answer = episode.start(asked)
            else:
                answer = episode.step(asked["text"])
            packed = json.dumps(answer, default=_as_json)
        except Exception as error:  # whatever the environment raises
            packed = json.dumps({"error": f"{type(error).__name__}: {error}"[:1000]})
        out.write(packed.encode() + b"\n")
        out.flush()


if __name__ == "__main__":
    sys.setrecursionlimit(5000)
    main()

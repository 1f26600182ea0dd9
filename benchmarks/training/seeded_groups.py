"""Groups of random tokens that follow from a seed, for measurements and tests of the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from deltawire.parity.routes import pack_routes
from deltawire.wire.rollouts import Group, Trajectory


class Routing(NamedTuple):
    """The experts of a model that a sampler would have recorded for each token and layer."""

    layers: int
    experts: int
    chosen: int


def seeded_group(
    number: int,
    *,
    tokens: int = 6,
    episodes: int = 4,
    prompt: Sequence[int] = (1, 2, 3),
    nonce: str = "n",
    failed: int | None = None,
) -> Group:
    """Returns a group of completions of equal length; ``failed`` is an episode that timed out."""
    rng = np.random.default_rng(number)
    trajectories = [
        Trajectory(
            rng.integers(0, 256, tokens, np.int32),
            np.full(tokens, -5.0, np.float32),
            np.zeros(tokens, np.int32),
            np.ones(tokens, np.uint8),
            float(place % 2),
            "stop",
            cause="timeout" if place == failed else "",
        )
        for place in range(episodes)
    ]
    return Group("w0", nonce, f"task {number}", 1.0, np.array(prompt, np.int32), trajectories)


def uneven_groups(
    seed: int | tuple[int, ...],
    *,
    count: int = 5,
    prompt: int,
    tokens: int,
    routing: Routing | None = None,
) -> list[Group]:
    """Returns groups of four completions; prompts are shorter than ``prompt`` tokens, completions
    than ``tokens``."""
    rng = np.random.default_rng(seed)

    def trajectory(start: int) -> Trajectory:
        length, routes = int(rng.integers(1, tokens)), b""
        if routing is not None:
            scores = rng.random((start + length - 1, routing.layers, routing.experts))
            chosen = np.argsort(scores, axis=2)[..., : routing.chosen].astype(np.int32)
            routes = pack_routes(chosen, experts=routing.experts)
        return Trajectory(
            rng.integers(0, 256, length).astype(np.int32),
            (-5 - rng.random(length)).astype(np.float32),
            np.zeros(length, np.int32),
            np.ones(length, np.uint8),
            float(rng.integers(0, 2)),
            "stop",
            routes=routes,
        )

    groups = []
    for number in range(count):
        start = int(rng.integers(2, prompt))
        members = [trajectory(start) for _ in range(4)]
        given = rng.integers(0, 256, start).astype(np.int32)
        groups.append(Group("w", "n", f"t{number}", 1.0, given, members))
    return groups

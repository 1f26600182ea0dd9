"""Draws a plan of faults from a seed: what happens to which process, and when.

A plan is a list, so a history that fails can be tried again without some of its faults, with the
same seed for everything else. It stays within what the protocol promises: of two bad answers to one
process, one comes at least `APART_S` after the other, since code that acts on evidence asks again
within this time; a request that got no answer arrives within `Limits.late_s`, and a process stands
still for at most `Limits.stop_s`, which together are less than the time of P43.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from simulated_time import SimulatedProcess, scheduler

APART_S = 120.0

BAD_ANSWERS = ("flipped", "short", "missing", "stale")
"""Answers that are wrong; the object in the store is whole."""

WRITES = ("put", "create", "delete")

ROLES = {"trainer": 5, "reader": 2, "retention": 4, "worker": 5, "relay": 4}
"""How often a process of each role is struck, if the run has one."""

WEIGHTS = {
    "flipped": 2, "short": 2, "missing": 3, "stale": 2, "lost": 4, "unanswered": 8, "late": 8,
    "kill before": 4, "kill after": 6, "stop before": 3, "stop after": 3, "away": 2, "slow": 2,
    "full": 1, "refused": 1, "wall clock": 1, "rival": 2,
}  # fmt: skip
"""How often each kind comes."""


@dataclass(frozen=True)
class Limits:
    """The longest time that a request is under way, and that a process stands still."""

    late_s: float
    stop_s: float


@dataclass
class Fault:
    """One fault: its kind, when it waits for a request, of a process of which role.

    ``draw`` is a number from 0 to 1 that chooses everything else. ``skip`` is how many requests
    that it suits pass before it.
    """

    number: int
    at: float
    kind: str
    role: str
    draw: float
    seconds: float
    skip: int
    strikes: Callable[[Fault, SimulatedProcess], None] | None = field(default=None, repr=False)

    def suits(self, verb: str, key: str) -> bool:
        """Returns whether a request can have this fault."""
        if self.kind in ("flipped", "stale"):
            return verb in ("get", "range")
        if self.kind == "short":
            return verb == "list" or verb == "range"
        if self.kind == "missing":
            return verb in ("get", "range", "head")
        if self.kind in ("unanswered", "late"):
            return verb in WRITES
        return bool(key or verb)

    def counts_down(self) -> bool:
        """Returns whether this is the request; the ones before it pass."""
        self.skip -= 1
        return self.skip < 0

    def damage(self, data: bytes) -> bytes:
        """Returns bytes with a flipped bit, or the first part of them."""
        if not data:
            return b"?"
        at = self.place(len(data))
        if self.kind == "short":
            return data[:at]
        return data[:at] + bytes([data[at] ^ 1 << self.number % 8]) + data[at + 1 :]

    def place(self, count: int) -> int:
        """Chooses one of ``count``."""
        return min(int(self.draw * count), count - 1)

    def strike(self, process: SimulatedProcess) -> None:
        """Kills the process, or stops it for some time."""
        if self.kind.startswith("stop"):
            process.stopped_until = scheduler().now + self.seconds
        else:
            assert self.strikes is not None
            self.strikes(self, process)

    def __str__(self) -> str:
        return f"{self.at:8.1f} s  {self.kind}, at a {self.role} ({self.seconds:.0f} s)"


def plan(
    seed: str, *, seconds: float, every_s: float, limits: Limits, roles: Sequence[str]
) -> list[Fault]:
    """Draws the faults of ``seconds``, one every ``every_s`` on average, of these roles."""
    source = random.Random(f"{seed} faults")
    found: list[Fault] = []
    at = 0.0
    while (at := at + source.expovariate(1 / every_s)) < seconds:
        kind = source.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        role = source.choices(roles, [ROLES[one] for one in roles])[0]
        draw, skip = source.random(), int(source.expovariate(1 / 12))
        longest = {
            "late": limits.late_s, "stop before": limits.stop_s, "stop after": limits.stop_s,
            "away": 300.0, "slow": 300.0, "full": 120.0, "refused": 60.0, "rival": 30.0,
            "wall clock": 7200.0, "kill before": 60.0, "kill after": 60.0,
        }.get(kind, 0.0)  # fmt: skip
        lasts = longest * source.random() ** 2
        found.append(Fault(len(found), at, kind, role, draw, lasts, skip))
    return found

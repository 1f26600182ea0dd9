"""Scaffolds by name, and the turns that an episode may have with one."""

from __future__ import annotations

from typing import Annotated, Protocol

from msgspec import Meta

BUILT_IN_SCAFFOLDS = ("plan_then_solve", "check_and_retry")
NO_SCAFFOLD = "plain"

Scaffold = Annotated[
    str,
    Meta(
        pattern=r"^(plain|plan_then_solve|check_and_retry"
        r"|[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*)\Z"
    ),
]
"""``plain``, one of `BUILT_IN_SCAFFOLDS`, or ``module:function``."""


class _Turns(Protocol):
    @property
    def max_turns(self) -> int: ...
    @property
    def max_steps(self) -> int: ...
    @property
    def scaffold(self) -> str: ...


def turn_limit(rollout: _Turns) -> int:
    """The most turns of an episode: ``max_turns`` for the environment, one more with a scaffold
    that is built in, and at most ``max_steps`` with any scaffold."""
    if rollout.scaffold == NO_SCAFFOLD:
        return rollout.max_turns
    if rollout.scaffold in BUILT_IN_SCAFFOLDS:
        return min(rollout.max_turns + 1, rollout.max_steps)
    return rollout.max_steps

"""Scaffolds: environments around an environment, which lead the model through more turns.

::

    plan_then_solve    question ─▶ plan ─▶ "now solve it" ─▶ answer ─▶ environment
    check_and_retry    question ─▶ answer ─▶ "check it" ─▶ answer ─▶ environment

The environment sees only the last answer, so its reward stays what it was. A scaffold never sees
the solution. ``module:function`` names a function of a module that this machine trusts, which takes
an environment and returns one. Where a task source is ``deterministic``, such a function must be
so too: the trainer plays episodes again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache

from deltawire.chat.messages import Message, Tool
from deltawire.config.own_code import load_code, require_code
from deltawire.config.scaffold import NO_SCAFFOLD
from deltawire.envs.base import Action, AgentHarness, Environment, Turn
from deltawire.errors import InputError

PLAN = "\nFirst write a short plan of the steps. Do not give the answer yet."
SOLVE = "Now follow your plan and give the answer."
CHECK = "Check your answer step by step. Then give the final answer, corrected if it was wrong."

Wrapper = Callable[[Environment], Environment]


class _Wrapped(Environment):
    """Passes everything on to the environment inside."""

    def __init__(self, inner: Environment) -> None:
        self._inner = inner
        self._turns = 0

    @property
    def tools(self) -> Sequence[Tool]:
        return self._inner.tools

    async def reset(self) -> Turn:
        return await self._inner.reset()

    async def step(self, action: Action) -> Turn:
        self._turns += 1
        said = self._reply(self._turns)
        return Turn(said) if said else await self._inner.step(action)

    def _reply(self, turn: int) -> str:
        """The scaffold's own answer to a turn; empty if the environment answers."""
        raise NotImplementedError

    async def probes(self) -> Mapping[str, float]:
        return await self._inner.probes()

    async def close(self) -> None:
        await self._inner.close()

    def solved(self, total_reward: float) -> bool:
        return self._inner.solved(total_reward)


class PlanThenSolve(_Wrapped):
    """Asks for a plan before the first answer.

    Example::

        environment = PlanThenSolve(tasks.open(task))
    """

    async def reset(self) -> Turn:
        """Begins the episode; the last message also asks for a plan."""
        turn = await self._inner.reset()
        messages = list(turn.messages) or [Message("user", "")]
        messages[-1] = replace(messages[-1], content=f"{messages[-1].content}{PLAN}")
        return Turn(messages, turn.reward, turn.done)

    def _reply(self, turn: int) -> str:
        return SOLVE if turn == 1 else ""


class CheckAndRetry(_Wrapped):
    """Asks the model to check its first answer, and passes on the second.

    Example::

        environment = CheckAndRetry(tasks.open(task))
    """

    def _reply(self, turn: int) -> str:
        return CHECK if turn == 1 else ""


SCAFFOLDS: dict[str, Wrapper] = {
    "plan_then_solve": PlanThenSolve,
    "check_and_retry": CheckAndRetry,
}


def require_scaffold(name: str) -> None:
    """Raises `InputError` for a scaffold of a module that this machine does not trust; imports
    nothing."""
    if name != NO_SCAFFOLD and name not in SCAFFOLDS:
        require_code("rollout.scaffold", name)


def scaffolded(environment: Environment | AgentHarness, name: str) -> Environment | AgentHarness:
    """Puts a scaffold around an environment; ``plain`` puts none.

    Raises `InputError` for a harness, for a module that this machine does not trust, and for a
    function that cannot be loaded.
    """
    if name == NO_SCAFFOLD:
        return environment
    if isinstance(environment, AgentHarness):
        raise InputError(
            f"rollout.scaffold {name} needs an environment, and this one is a harness, which "
            "leads its own conversation",
            hint='set rollout.scaffold = "plain"',
        )
    try:
        found = _wrapper(name)(environment)
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"rollout.scaffold {name} raised {type(error).__name__}: {error}"
        ) from error
    if not all(callable(getattr(found, method, None)) for method in ("reset", "step", "close")):
        raise InputError(
            f"rollout.scaffold {name} returned {type(found).__name__}, which is no environment",
            hint="return an object with the methods of deltawire.envs.Environment",
        )
    return found


@cache
def _wrapper(name: str) -> Wrapper:
    if name in SCAFFOLDS:
        return SCAFFOLDS[name]
    found = load_code("rollout.scaffold", name)
    if not callable(found):
        raise InputError(f"rollout.scaffold {name} is not a function")
    wrapper: Wrapper = found
    return wrapper

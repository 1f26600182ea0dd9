"""Keeps `SystemExit` in an environment's tasks from ending the worker.

An event loop sets a task's exception as its result, but raises `SystemExit` out of the loop. A
library that exits in a task which it started itself, as harnesses do, would so end the process.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import Any

_CATCHING: ContextVar[bool] = ContextVar("catching_exits", default=False)


class ExitedError(Exception):
    """An environment's task raised `SystemExit`."""


def catch_exits() -> None:
    """Makes the tasks that are started from this context, and from theirs, raise `ExitedError`
    instead of `SystemExit`."""
    loop = asyncio.get_running_loop()
    if loop.get_task_factory() is None:
        loop.set_task_factory(_new_task)
    _CATCHING.set(True)


def _new_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    context = options.get("context")
    catching = _CATCHING.get() if context is None else context.get(_CATCHING, False)
    started = _caught(coroutine) if catching else coroutine
    return asyncio.Task(started, loop=loop, **options)


async def _caught(coroutine: Any) -> Any:
    try:
        return await coroutine
    except SystemExit as error:
        raise ExitedError(f"SystemExit: {error}") from error

"""Environments: sources of tasks, and the scores of answers.

Names are imported on first use, so that the sandbox's launcher, which runs in a bare interpreter,
can import its own subpackage without NumPy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltawire.envs.base import (
        Action,
        AgentHarness,
        Environment,
        Message,
        ModelEndpoint,
        Task,
        TaskSource,
        Tool,
        ToolCall,
        Turn,
    )
    from deltawire.envs.reasoning import ReasoningTasks
    from deltawire.envs.registry import open_tasks, register

__all__ = [
    "Action",
    "AgentHarness",
    "Environment",
    "Message",
    "ModelEndpoint",
    "ReasoningTasks",
    "Task",
    "TaskSource",
    "Tool",
    "ToolCall",
    "Turn",
    "open_tasks",
    "register",
]

_MODULES = {"ReasoningTasks": "reasoning", "open_tasks": "registry", "register": "registry"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'base')}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

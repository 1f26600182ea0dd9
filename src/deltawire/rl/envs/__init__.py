"""Environments: where tasks come from and what an answer is worth."""

from deltawire.rl.envs.base import (
    Access,
    Action,
    Driven,
    Environment,
    Message,
    Task,
    TaskSource,
    Tool,
    ToolCall,
    Turn,
)
from deltawire.rl.envs.reasoning import ReasoningTasks
from deltawire.rl.envs.registry import open_tasks, register

__all__ = [
    "Access",
    "Action",
    "Driven",
    "Environment",
    "Message",
    "ReasoningTasks",
    "Task",
    "TaskSource",
    "Tool",
    "ToolCall",
    "Turn",
    "open_tasks",
    "register",
]

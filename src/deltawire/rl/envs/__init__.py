"""Environments: where tasks come from and what an answer is worth."""

from deltawire.rl.envs.base import Environment, Task, TaskSource, Turn
from deltawire.rl.envs.reasoning import ReasoningTasks

__all__ = ["Environment", "ReasoningTasks", "Task", "TaskSource", "Turn"]

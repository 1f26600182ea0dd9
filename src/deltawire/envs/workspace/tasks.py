"""`WorkspaceTasks` draws problems from seeds, and opens episodes that share one sandbox."""

from __future__ import annotations

from functools import lru_cache

from deltawire.config import TaskConfig
from deltawire.config.machine import machine_policy
from deltawire.envs.base import Task
from deltawire.envs.sandbox.box import Sandbox
from deltawire.envs.workspace.episode import Workspace
from deltawire.envs.workspace.loopholes import LoopholeWorkspace
from deltawire.envs.workspace.problems import Problem, problem
from deltawire.envs.workspace.settings import WorkspaceSettings
from deltawire.errors import InputError

_SEARCH = 1000


class WorkspaceTasks:
    """A `TaskSource`. A task is the seed of its problem; its family is the kind of fault.

    Held-out problems are the same for every seed of the run, and a problem whose files equal those
    of one of them is never drawn. Raises `InputError` for invalid options, and for isolation that
    this machine does not allow.

    Example::

        tasks = WorkspaceTasks(TaskConfig(environment="workspace"), seed=0)
        episode = tasks.open(tasks.draw("worker-0", 0))
    """

    def __init__(self, config: TaskConfig, *, seed: int) -> None:
        self.settings = WorkspaceSettings.of(config.options).within(machine_policy())
        self.sandbox = Sandbox(isolation=self.settings.isolation, at_once=self.settings.at_once)
        self._seed = seed
        self._heldout = [_task(f"heldout/{number}") for number in range(config.heldout)]
        self._reserved = {_content(task.data) for task in self._heldout}

    def draw(self, stream: str, index: int) -> Task:
        """Draws problem ``index`` of a stream; never a held-out one."""
        for attempt in range(_SEARCH):
            task = _task(f"{self._seed}/{stream}/{index}/{attempt}")
            if _content(task.data) not in self._reserved:
                return task
        raise InputError("every problem drawn is held out", hint="lower task.heldout")

    def heldout(self) -> list[Task]:
        """The held-out problems, which are never drawn."""
        return self._heldout

    def open(self, task: Task) -> Workspace:
        """Opens a fresh episode; raises `InputError` if this machine cannot isolate it."""
        self.sandbox.check_now()
        kind = Workspace if self.settings.loophole == "none" else LoopholeWorkspace
        return kind(_problem(task.data), self.sandbox, self.settings)


@lru_cache(maxsize=256)
def _problem(seed: str) -> Problem:
    return problem(seed)


def _task(seed: str) -> Task:
    return Task(f"workspace/{seed}", seed, _problem(seed).family)


def _content(seed: str) -> tuple[tuple[str, bytes], ...]:
    return tuple(sorted(_problem(seed).files.items()))

"""Draws from several sources of tasks in one run, each with its share of the groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from deltawire.config import MixtureEntry
from deltawire.data import mixture_of, stream_seed
from deltawire.envs.base import (
    AgentHarness,
    Environment,
    Message,
    Task,
    TaskSource,
    TasksWithAnswers,
)
from deltawire.errors import InputError


class MixtureTasks:
    """A `TaskSource` that draws from others by their weights.

    A task's family is the name of its source, or begins with it where the source has families of
    its own. The held-out problems are those of all sources.
    """

    def __init__(
        self, entries: Sequence[MixtureEntry], sources: Sequence[TaskSource], *, seed: int
    ) -> None:
        self._names = [entry.name for entry in entries]
        self._sources = dict(zip(self._names, sources, strict=True))
        self._weights = [entry.weight for entry in entries]
        self._seed = seed
        every = self._sources.values()
        self.deterministic = all(getattr(one, "deterministic", False) for one in every)
        self.may_time_out = any(getattr(one, "may_time_out", False) for one in every)
        mixture_of(0, self._weights, seed=seed)

    @property
    def parts(self) -> dict[str, TaskSource]:
        """The sources by name."""
        return self._sources

    def draw(self, stream: str, index: int) -> Task:
        """Draws from the source whose turn it is: every stream has the shares of the weights."""
        seed = stream_seed(self._seed, stream)
        part, place = mixture_of(index, self._weights, seed=seed)
        return self._named(part, self._sources[self._names[part]].draw(stream, place))

    def heldout(self) -> list[Task]:
        """The held-out problems of all sources."""
        return [
            self._named(part, task)
            for part, name in enumerate(self._names)
            for task in self._sources[name].heldout()
        ]

    def open(self, task: Task) -> Environment | AgentHarness:
        """Opens a fresh episode of ``task``."""
        name, inner = task.data
        return self._sources[name].open(inner)

    def prompt(self, task: Task) -> str | Sequence[Message]:
        """See `deltawire.envs.base.TasksWithAnswers`."""
        name, inner = task.data
        return self._answering(name).prompt(inner)

    def answer(self, task: Task) -> str:
        """See `deltawire.envs.base.TasksWithAnswers`."""
        name, inner = task.data
        return self._answering(name).answer(inner)

    def question(self, task: Task) -> str:
        """See `deltawire.envs.base.TasksWithAnswers`."""
        name, inner = task.data
        return f"{name}: {self._answering(name).question(inner)}"

    def _named(self, part: int, task: Task) -> Task:
        name = self._names[part]
        family = name if task.family in ("", name) else f"{name}/{task.family}"
        return replace(task, identity=f"{name}/{task.identity}", data=(name, task), family=family)

    def _answering(self, name: str) -> TasksWithAnswers:
        source = self._sources[name]
        if not isinstance(source, TasksWithAnswers):
            raise InputError(
                f"the task {name} of the mixture has no answers for a warm start",
                hint="set warm_start.max_steps to 0",
            )
        return source

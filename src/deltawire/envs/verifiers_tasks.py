"""Runs environments made with `verifiers` (0.4), with their tasksets, harnesses and rewards.

::

    [task]
    environment = "verifiers"
    heldout = 20
    options = { taskset = "my-taskset", select = { shuffle = true }, tasks = 1000 }

The options are those of ``vf-eval``: ``taskset`` is its first argument, ``env`` what it takes as
``--env.*`` or in a file, ``select`` which tasks of the taskset are used, as ``--select.*``. At most
``tasks`` of these are read, and the first ``heldout`` of them are held out. An agent whose
``runtime`` is not set runs in a subprocess on this machine, and calls the model through a server on
loopback: verifiers' own defaults need an account at a hosted service.

The ids name Python packages, each of which this machine must trust
(`deltawire.config.machine`). The reward is the sum of the trainable agents' rewards. A harness may
start any program; it calls the policy at the episode's endpoint.
"""

from __future__ import annotations

import itertools
import os
import secrets
from dataclasses import dataclass
from typing import Any

from deltawire.config import TaskConfig
from deltawire.config.own_code import require_code
from deltawire.envs.base import AgentHarness, ModelEndpoint, Task
from deltawire.errors import InputError

DEFAULT_TASKS = 10_000


@dataclass
class _VerifiersEpisode(AgentHarness):
    """One `verifiers` episode, with its own environment object."""

    settings: dict[str, Any]
    task: Any

    async def drive(self, endpoint: ModelEndpoint) -> float:
        from verifiers.v1 import EvalClientConfig, ModelContext

        # The library reads keys from environment variables only.
        variable = f"DELTAWIRE_EPISODE_KEY_{secrets.token_hex(8)}"
        os.environ[variable] = endpoint.api_key
        try:
            environment = _environment(self.settings)
            client = EvalClientConfig(base_url=endpoint.base_url, api_key_var=variable)
            context = ModelContext(model=endpoint.model, client=client)
            async with environment.serving():
                episode = await environment.run_episode(self.task, context)
        finally:
            del os.environ[variable]
        errors = [*episode.errors, *(error for t in episode.traces for error in t.errors)]
        if not episode.ok:
            told = f"{errors[0].type}: {errors[0].message}" if errors else "no reason given"
            raise RuntimeError(f"the verifiers episode failed: {told}")
        return float(sum(trace.reward for trace in episode.traces if trace.agent.trainable))


class VerifiersTasks:
    """A `TaskSource` over one `verifiers` taskset.

    Raises `InputError` without the package, for modules that are not trusted, for settings that
    the environment refuses, and for a taskset with no tasks left to train on.
    """

    def __init__(self, config: TaskConfig, *, seed: int) -> None:
        settings = _settings(config.options)
        for module in modules_of(config):
            require_code("task.options", module)
        self._settings: dict[str, Any] = settings
        self._seed = seed
        environment = _environment(settings)
        self._family = environment.config.env_id[:64]
        count = int(config.options.get("tasks", DEFAULT_TASKS))
        chosen = _select(environment.taskset, config.options.get("select", {}))
        self._tasks = list(itertools.islice(iter(chosen), count))
        if len(self._tasks) <= config.heldout:
            raise InputError(
                f"{self._family} has {len(self._tasks)} tasks, and {config.heldout} are held out",
                hint="lower task.heldout",
            )
        self._heldout = config.heldout

    def draw(self, stream: str, index: int) -> Task:
        """Draws any task that is not held out."""
        import random

        draw = random.Random(f"{self._seed} {stream} {index}")
        return self._task(draw.randrange(self._heldout, len(self._tasks)))

    def heldout(self) -> list[Task]:
        """The first tasks."""
        return [self._task(number) for number in range(self._heldout)]

    def open(self, task: Task) -> AgentHarness:
        """Opens a fresh episode of ``task``."""
        return _VerifiersEpisode(self._settings, self._tasks[task.data])

    def _task(self, number: int) -> Task:
        return Task(f"{self._family}/{number}", number, self._family)


def modules_of(config: TaskConfig) -> list[str]:
    """Returns the modules that an environment imports; raises `InputError` for wrong options."""
    return sorted(_modules(_settings(config.options)))


def _settings(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the environment's configuration; raises `InputError` for options that are none."""
    env, taskset = options.get("env", {}), options.get("taskset", "")
    known = {"env", "taskset", "select", "tasks"}
    if options.keys() - known or not isinstance(env, dict) or not isinstance(taskset, str):
        raise InputError(
            "task.options for verifiers are taskset, env, select and tasks",
            hint='for example { taskset = "my-taskset", tasks = 1000 }',
        )
    if taskset:
        own = env.get("taskset", {})
        if not isinstance(own, dict) or own.get("id", taskset) != taskset:
            raise InputError("task.options.taskset and task.options.env.taskset.id differ")
        env = {**env, "taskset": {**own, "id": taskset}}
    if not env:
        raise InputError(
            "task.options names no verifiers environment",
            hint='for example { taskset = "my-taskset" }',
        )
    return env


def _select(taskset: Any, select: Any) -> Any:
    """Returns the tasks that ``select`` names, as ``vf-eval`` does."""
    from verifiers.v1.configs.select import SelectConfig

    try:
        return taskset.select(SelectConfig.model_validate(select))
    except ValueError as error:
        raise InputError(f"verifiers refuses task.options.select: {error}") from error


def _modules(settings: Any) -> set[str]:
    """The packages that the ids of a configuration import; those of verifiers itself are trusted
    like the package."""
    found: set[str] = set()
    if isinstance(settings, dict):
        for key, value in settings.items():
            if key == "id" and isinstance(value, str) and value:
                module = value.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
                found.add(module)
            else:
                found |= _modules(value)
    elif isinstance(settings, list):
        for value in settings:
            found |= _modules(value)
    return found


def _environment(settings: dict[str, Any]) -> Any:
    try:
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config
    except ImportError as error:
        raise InputError(
            f"verifiers environments need the package verifiers: {error}",
            hint="pip install 'deltawire[verifiers]'",
        ) from error
    try:
        return load_environment(_on_this_machine(resolve_env_config(settings)))
    except Exception as error:  # The environment's package may raise anything.
        raise InputError(f"verifiers refuses task.options.env: {error}") from error


def _on_this_machine(config: Any) -> Any:
    """Returns a configuration in which agents and interception that the user did not place run
    on this machine."""
    from pydantic import BaseModel
    from verifiers.v1 import AgentConfig, SharedEnvConfig, SubprocessConfig
    from verifiers.v1.interception import InterceptionServerConfig

    if isinstance(config, dict):
        members = {name: _on_this_machine(value) for name, value in config.items()}
        return members if any(config[name] is not one for name, one in members.items()) else config
    if isinstance(config, list):
        items = [_on_this_machine(one) for one in config]
        return items if any(a is not b for a, b in zip(items, config, strict=True)) else config
    if not isinstance(config, BaseModel):
        return config
    changed: dict[str, Any] = {}
    for name in type(config).model_fields:
        value = getattr(config, name)
        if (placed := _on_this_machine(value)) is not value:
            changed[name] = placed
    given = config.model_fields_set
    if isinstance(config, AgentConfig) and "runtime" not in given:
        changed["runtime"] = SubprocessConfig()
    if isinstance(config, SharedEnvConfig) and "interception" not in given:
        changed["interception"] = InterceptionServerConfig()
    return config.model_copy(update=changed) if changed else config

"""Opens environments by the name that a configuration gives them.

A run's configuration comes from its bucket, so it never decides by itself which code runs: a name
is a built-in environment, one that this process registered, an entry point of an installed package,
or ``module:attribute`` of a module that this machine trusts (`deltawire.config.machine`). A
new built-in environment is one module and one line of `BUILT_IN`.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import entry_points
from typing import Any

from deltawire.config import TaskConfig
from deltawire.config.machine import machine_policy
from deltawire.config.own_code import load_code, require_code
from deltawire.envs.base import TaskSource
from deltawire.errors import InputError

ENTRY_POINTS = "deltawire.environments"

Factory = Callable[..., TaskSource]
"""Called with the `TaskConfig`, and with the run's seed as ``seed``."""

BUILT_IN = {
    "reasoning_gym": "deltawire.envs.reasoning:ReasoningTasks",
    "dataset": "deltawire.envs.dataset:DatasetTasks",
    "serial_steps": "deltawire.envs.serial_steps:SerialTasks",
    "workspace": "deltawire.envs.workspace:WorkspaceTasks",
    "verifiers": "deltawire.envs.verifiers_tasks:VerifiersTasks",
    "openenv": "deltawire.envs.openenv:OpenEnvTasks",
    "text_gym": "deltawire.envs.text_gym:TextGymTasks",
    "simulated_users": "deltawire.envs.simulated_users:SimulatedUserTasks",
}
"""The built-in environments: one line each."""
TOOL_SERVERS = {"mcp": "deltawire.envs.mcp.server"}
"""The kinds of servers that ``task.tools`` may name: a module with `open_server`, which takes a
`ToolServerConfig` and returns a function that makes a `deltawire.envs.served_tools.ToolServer`, and
with `require_server`, which raises `InputError` where that would."""
_MODULES_OF_OPTIONS = {
    "verifiers": "deltawire.envs.verifiers_tasks:modules_of",
    "openenv": "deltawire.envs.openenv:modules_of",
    "text_gym": "deltawire.envs.text_gym:modules_of",
}
"""Functions that return the modules which an environment imports for its options, of those that
import any."""
_registered: dict[str, Factory] = {}


def register(name: str, factory: Factory) -> None:
    """Registers an environment for the configurations of this process; a name may be replaced."""
    _registered[name] = factory


def open_tasks(config: TaskConfig, *, seed: int) -> TaskSource:
    """Opens the tasks that a configuration names.

    Raises `InputError` for a name that is not known or not allowed on this machine, for a module
    that is not trusted or has no such attribute, and whatever the environment raises.
    """
    if config.mixture:
        from deltawire.envs.mixture import MixtureTasks

        sources = [open_tasks(entry.task, seed=seed) for entry in config.mixture]
        return MixtureTasks(config.mixture, sources, seed=seed)
    machine_policy().require_environment(config.environment)
    source = _factory(config.environment)(config, seed=seed)
    if not config.tools:
        return source
    from deltawire.envs.served_tools import TasksWithTools

    return TasksWithTools(source, [open_() for open_ in _tool_servers(config, "open_server")])


def _tool_servers(config: TaskConfig, verb: str) -> Iterator[Callable[[], Any]]:
    """A function of its kind, with its configuration, for each server of tools."""
    for tools, server in zip(config.tools, config.servers(), strict=True):
        yield partial(_attribute(f"{TOOL_SERVERS[tools.partition(':')[0]]}:{verb}"), server)


def require_environment(name: str) -> None:
    """Raises `InputError` where `open_tasks` would for the name; imports no environment."""
    machine_policy().require_environment(name)
    names = entry_points(group=ENTRY_POINTS).names
    if name in _registered or name in BUILT_IN or name in names:
        return
    if ":" not in name:
        raise _unknown(name)
    require_code("task.environment", name)


def require_tasks(config: TaskConfig) -> None:
    """Raises `InputError` where `open_tasks` would for an environment's name, or a module that this
    machine does not trust; imports neither."""
    for task in config.each():
        require_environment(task.environment)
        if task.reward:
            require_code("task.reward", task.reward)
        for require in _tool_servers(task, "require_server"):
            require()
        if place := _MODULES_OF_OPTIONS.get(task.environment, ""):
            for module in _attribute(place)(task):
                require_code("task.options", module)


def _factory(name: str) -> Factory:
    if name in _registered:
        return _registered[name]
    if name in BUILT_IN:
        return _attribute(BUILT_IN[name])
    for entry in entry_points(group=ENTRY_POINTS):
        if entry.name == name:
            return _attribute(entry.value)
    if ":" in name:
        factory: Factory = load_code("task.environment", name)
        return factory
    raise _unknown(name)


def _unknown(name: str) -> InputError:
    known = [*BUILT_IN, *_registered, *entry_points(group=ENTRY_POINTS).names]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    return InputError(
        f"there is no environment {name!r}",
        hint=f"did you mean {near[0]}?" if near else f"known here: {', '.join(sorted(known))}",
    )


def _attribute(place: str) -> Callable[..., Any]:
    module, _, attribute = place.partition(":")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and place in BUILT_IN.values():
            raise  # The command line says which extra brings the package.
        raise InputError(f"cannot load environment {place}: {error}") from error
    return found

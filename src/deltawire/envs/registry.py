"""Environments by the name that a configuration gives them.

A run's configuration comes from its bucket, so it never decides alone which code runs: a name is a
built-in environment, one that this process registered, an entry point of an installed package, or
``module:attribute`` of a module that this machine's user has named in
``DELTAWIRE_TRUSTED_MODULES``.
"""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Callable
from importlib.metadata import entry_points

from deltawire.config import TaskConfig
from deltawire.envs.base import TaskSource
from deltawire.errors import InputError

ENTRY_POINTS = "deltawire.environments"
TRUSTED = "DELTAWIRE_TRUSTED_MODULES"
"""The environment variable: module names, separated by commas."""

Factory = Callable[..., TaskSource]
"""Called with the `TaskConfig`, and with the run's seed as ``seed``."""

_BUILT_IN = {
    "reasoning_gym": "deltawire.envs.reasoning:ReasoningTasks",
    "workspace": "deltawire.envs.workspace:WorkspaceTasks",
    "verifiers": "deltawire.envs.verifiers_tasks:VerifiersTasks",
}
_registered: dict[str, Factory] = {}


def register(name: str, factory: Factory) -> None:
    """Let configurations of this process name an environment; the same name again replaces it."""
    _registered[name] = factory


def open_tasks(config: TaskConfig, *, seed: int) -> TaskSource:
    """The tasks that a configuration names.

    Raises `InputError` for a name that is not known here, for a module that is not trusted or has
    no such attribute, and whatever the environment raises.
    """
    return _factory(config.environment)(config, seed=seed)


def _factory(name: str) -> Factory:
    if name in _registered:
        return _registered[name]
    if name in _BUILT_IN:
        return _attribute(_BUILT_IN[name])
    for entry in entry_points(group=ENTRY_POINTS):
        if entry.name == name:
            return _attribute(entry.value)
    if ":" in name:
        require_trust(name.partition(":")[0])
        return _attribute(name)
    known = [*_BUILT_IN, *_registered, *entry_points(group=ENTRY_POINTS).names]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    raise InputError(
        f"there is no environment {name!r}",
        hint=f"did you mean {near[0]}?" if near else f"known here: {', '.join(sorted(known))}",
    )


def require_trust(module: str) -> None:
    """Raises `InputError` unless this machine's user has named ``module`` as trusted."""
    if module not in os.environ.get(TRUSTED, "").split(","):
        raise InputError(
            f"the run wants code of module {module}, which this machine does not trust",
            hint=f"if you do, set {TRUSTED}={module} for every process of the run",
        )


def _attribute(place: str) -> Factory:
    module, _, attribute = place.partition(":")
    try:
        factory: Factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InputError(f"cannot load environment {place}: {error}") from error
    return factory

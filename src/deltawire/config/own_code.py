"""Loads code that a setting names: the one gate between a run's configuration and an import.

A configuration comes from a run's bucket, where every writer can change it. `load_code` imports
only what the user of this machine trusts (`deltawire.config.machine`). `load_own_code` is for
options of a command line, which that user gave.
"""

from __future__ import annotations

import importlib
from typing import Any, Literal, get_args

from deltawire.config.machine import machine_policy
from deltawire.errors import InputError

CodeSetting = Literal[
    "task.environment",
    "task.reward",
    "task.options",
    "rollout.scaffold",
    "train.loss.surrogate",
    "live.reward_function",
]
"""The settings of a run that may name code as ``module:attribute``. ``task.options`` does for
environments of `verifiers`, whose ids are packages."""
CODE_SETTINGS: tuple[CodeSetting, ...] = get_args(CodeSetting)


def require_code(setting: CodeSetting, place: str) -> None:
    """Raises `InputError` unless this machine trusts the module of ``module:attribute``, or the
    module ``place``; imports nothing."""
    machine_policy().require_trust(place.partition(":")[0], setting)


def load_code(setting: CodeSetting, place: str) -> Any:
    """Imports ``module:attribute`` if this machine trusts the module.

    Raises `InputError` if it does not, or if there is no such module or attribute.

    Example::

        reward = load_code("live.reward_function", "my_rewards:reward")
    """
    require_code(setting, place)
    return _loaded(setting, place)


def load_own_code(option: str, place: str) -> Any:
    """Imports ``module:attribute`` that an option of this command line names; never pass it what
    was read from a bucket. Raises `InputError` if there is no such module or attribute."""
    return _loaded(option, place)


def _loaded(name: str, place: str) -> Any:
    module, _, attribute = place.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(
            f"cannot load {name} {place[:200]}: {error}",
            hint="name a function of a module that python can import",
        ) from error

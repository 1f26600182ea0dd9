"""Reads deltawire's settings from vLLM's configuration."""

from __future__ import annotations

from typing import Any

from deltawire.engines.following.settings import FollowSettings, parse
from deltawire.engines.live_parts import attests_here

SECTION = "deltawire"
"""The member of vLLM's ``additional_config`` that holds the settings."""


def settings_of(vllm_config: Any) -> FollowSettings | None:
    """Returns the settings in ``--additional-config '{"deltawire": {…}}'``; None if there are none;
    a later call then names the run.
    """
    additional = getattr(vllm_config, "additional_config", None)
    if not isinstance(additional, dict) or not additional.get(SECTION):
        return None
    return parse(additional[SECTION], where=f"additional_config.{SECTION}")


ATTESTS = "deltawire.engines.vllm.attesting."
"""The module whose worker extension reads weights and never writes them."""


def only_attests(vllm_config: Any) -> bool:
    """Returns whether deltawire only reads this engine's weights."""
    extension = getattr(vllm_config.parallel_config, "worker_extension_cls", "") or ""
    return extension.startswith(ATTESTS) or not follows(vllm_config)


def in_use(vllm_config: Any) -> bool:
    """Returns whether deltawire updates or reads this engine's weights."""
    return vllm_config is not None and (attests_here() or follows(vllm_config))


def follows(vllm_config: Any) -> bool:
    """Returns whether the engine's configuration names deltawire."""
    transfer = getattr(vllm_config, "weight_transfer_config", None)
    extension = getattr(vllm_config.parallel_config, "worker_extension_cls", "") or ""
    additional = getattr(vllm_config, "additional_config", None)
    return (
        (transfer is not None and transfer.backend == "deltawire")
        or extension.startswith("deltawire.")
        or (isinstance(additional, dict) and SECTION in additional)
    )


def in_use_here() -> bool:
    """Returns whether deltawire updates the weights of the engine being configured here."""
    from vllm.config import get_current_vllm_config_or_none

    return in_use(get_current_vllm_config_or_none())

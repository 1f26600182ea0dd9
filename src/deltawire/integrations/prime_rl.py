"""Attests prime-rl's vLLM servers after each update of its orchestrator::

    deltawire.integrations.prime_rl.verify(on_mismatch="stop")

in the orchestrator's process, for example ``python -m deltawire.integrations prime_rl
--on-mismatch stop prime_rl.orchestrator.orchestrator @ orchestrator.toml``. The weights must be
broadcast through files (``weight_broadcast.type = "filesystem"``): the files of a step are the
reference. The servers need ``DELTAWIRE_ATTEST=1`` and ``VLLM_SERVER_DEV_MODE=1``.
"""

from __future__ import annotations

import asyncio
from functools import wraps
from pathlib import Path
from typing import Any

from prime_rl.utils.client import InferencePool

from deltawire.attest.sides import folder_side
from deltawire.integrations.asking import over_http
from deltawire.integrations.checking import Ask, OnMismatch, WeightCheck, wrapped_once

BEARER = "Bearer "


def verify(on_mismatch: OnMismatch = "warn", *, every: int = 1) -> WeightCheck:
    """Compares the weights of all servers with the files of the step after each update. The options
    are those of `WeightCheck`, which is returned; the servers' key is that of prime-rl."""
    check = WeightCheck(on_mismatch, every=every, dtype=None)

    def wrap(original: Any) -> Any:
        @wraps(original)
        async def update_weights(
            self: Any, weight_dir: Path | None, lora_name: str | None = None, step: int = 0
        ) -> None:
            await original(self, weight_dir, lora_name=lora_name, step=step)
            if not check.due():
                return
            if lora_name is not None or weight_dir is None or not _has_weights(weight_dir):
                check.warn_once("only whole weights that are broadcast through files are compared")
                return
            await asyncio.to_thread(_examine, self, weight_dir, check)

        return update_weights

    wrapped_once(InferencePool, "update_weights", check, wrap)
    return check


def _has_weights(folder: Path) -> bool:
    return any(Path(folder).glob("*.safetensors"))


def _examine(inference: Any, folder: Path, check: WeightCheck) -> None:
    check.examine(folder_side(Path(folder)), engines_of(inference.admin_clients))


def engines_of(clients: Any) -> dict[str, Ask]:
    """Returns what asks each server, with the token of prime-rl's own client for it."""
    found: dict[str, Ask] = {}
    for client in clients:
        url = str(client.base_url).rstrip("/")
        token = client.headers.get("Authorization", "").removeprefix(BEARER)
        found[url] = over_http(url, token)
    return found

"""Attests prime-rl's vLLM servers after each update of its orchestrator::

    deltawire.integrations.prime_rl.verify(on_mismatch="stop")

in the orchestrator's process, for example ``python -m deltawire.integrations prime_rl
--on-mismatch stop prime_rl.orchestrator.orchestrator @ orchestrator.toml``. The weights must be
broadcast through files (``weight_broadcast.type = "filesystem"``): the files of a step are the
reference. The servers need ``DELTAWIRE_ATTEST=1`` and ``VLLM_SERVER_DEV_MODE=1``.
"""

from __future__ import annotations

import asyncio
import inspect
from functools import partial
from pathlib import Path
from typing import Any

from prime_rl.utils.client import InferencePool

from deltawire.attest.sides import folder_side
from deltawire.errors import InputError
from deltawire.integrations.asking import over_http
from deltawire.integrations.checking import Ask, OnMismatch, WeightCheck, wrapped_once

BEARER = "Bearer "


def verify(on_mismatch: OnMismatch = "warn", *, every: int = 1) -> WeightCheck:
    """Compares the weights of all servers with the files of the step after each update. The options
    are those of `WeightCheck`, which is returned; the servers' key is that of prime-rl."""
    check = WeightCheck(on_mismatch, every=every, dtype=None)
    return wrapped_once(InferencePool, "update_weights", check, _updated)


async def _updated(original: Any, check: WeightCheck, owner: Any, *args: Any, **kwargs: Any) -> Any:
    result = await original(owner, *args, **kwargs)
    if check.due():
        folder = check.tried(partial(_folder_of, original, owner, *args, **kwargs))
        await asyncio.to_thread(_examine, owner, folder, check)
    return result


def _folder_of(original: Any, *args: Any, **kwargs: Any) -> Path:
    """Returns the folder of whole weights that an update was given; raises `InputError` if it was
    given none."""
    given = inspect.getcallargs(original, *args, **kwargs)
    folder = given.get("weight_dir")
    adapter = given.get("lora_name") is not None
    if folder is None or adapter or not any(Path(folder).glob("*.safetensors")):
        raise InputError("only whole weights that are broadcast through files are compared")
    return Path(folder)


def _examine(inference: Any, folder: Path | None, check: WeightCheck) -> None:
    if folder is not None:
        reference = check.tried(partial(folder_side, folder))
        check.examine(reference, lambda: engines_of(inference.admin_clients))


def engines_of(clients: Any) -> dict[str, Ask]:
    """Returns what asks each server, with the token of prime-rl's own client for it."""
    found: dict[str, Ask] = {}
    for client in clients:
        url = str(client.base_url).rstrip("/")
        token = client.headers.get("Authorization", "").removeprefix(BEARER)
        found[url] = over_http(url, token)
    return found

"""Adds deltawire's calls to SGLang's HTTP server."""

from __future__ import annotations

import importlib
import multiprocessing
import sys
from typing import Any

from deltawire.engines.following.http_calls import EngineCalls

MEMBER = "deltawire"
"""The member of SGLang's internal state that holds the status."""

MODULE = "sglang.srt.entrypoints.http_server"
FORBIDDEN = frozenset(
    {"/update_weight_version", "/release_memory_occupation", "/resume_memory_occupation"}
)
"""SGLang's calls that would give tokens another label, or take the weights out of memory."""


def install() -> None:
    """Adds the calls in the process that serves HTTP, which is no child of another."""
    if MODULE in sys.modules or multiprocessing.parent_process() is None:
        from sglang.srt.utils.auth import AuthLevel, auth_level

        auth_level(AuthLevel.ADMIN_OPTIONAL)(EngineCalls.call)
        SglangCalls(importlib.import_module(MODULE).app, FORBIDDEN)


class SglangCalls(EngineCalls):
    """Reaches the schedulers, which answer between two steps."""

    async def order(self, name: str, value: int) -> None:
        """See `EngineCalls.order`; sent as a setting of the schedulers."""
        from sglang.srt.managers.io_struct import SetInternalStateReq

        await _manager().set_internal_state(SetInternalStateReq(server_args={name: value}))

    async def status(self) -> dict[str, Any]:
        """See `EngineCalls.status`."""
        status: dict[str, Any] = (await _manager().get_internal_state())[0][MEMBER]
        _manager()._update_weight_version_if_provided(str(status["version"]))  # For /model_info.
        return status


def _manager() -> Any:
    return sys.modules[MODULE]._global_state.tokenizer_manager

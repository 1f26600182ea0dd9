"""Adds deltawire's calls to vLLM's workers, for callers with their own coordinator.

Start vLLM with ``--worker-extension-cls deltawire.engines.vllm.worker.DeltawireWorker`` and call
the methods on all workers over ``collective_rpc``, in Ray or over HTTP.
"""

from __future__ import annotations

import json
from typing import Any

from deltawire.engines.following.settings import parse
from deltawire.engines.vllm import rank_calls


class DeltawireWorker:
    """Mixed into vLLM's worker class. Every answer is a dictionary with ``failure``, empty on
    success. Arguments may be strings, as vLLM's HTTP call passes them on."""

    def deltawire_open(self, settings: dict[str, Any] | str) -> dict[str, Any]:
        """Opens a run and loads its newest version; ``settings``: members of `FollowSettings`."""
        values = json.loads(settings) if isinstance(settings, str) else settings
        return rank_calls.open_run(self, parse(values, where="settings"))

    def deltawire_prepare(self, version: int | str) -> dict[str, Any]:
        """Starts preparing a version; returns at once."""
        return rank_calls.prepare(self, int(version))

    def deltawire_status(self) -> dict[str, Any]:
        """Returns what this rank serves and prepares."""
        return rank_calls.status(self)

    def deltawire_swap(self, version: int | str) -> dict[str, Any]:
        """Swaps to a prepared version, on all ranks or on none; call it on all of them."""
        return rank_calls.swap(self, int(version))

    def deltawire_attest(self) -> dict[str, Any]:
        """Digests the live bits."""
        return rank_calls.attest(self)

    def deltawire_repair(self) -> dict[str, Any]:
        """Writes the mirror's bits over the live ones."""
        return rank_calls.repair(self)

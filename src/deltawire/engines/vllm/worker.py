"""``--worker-extension-cls deltawire.engines.vllm.worker.DeltawireWorker``: for those who lead
the workers themselves over ``collective_rpc``, in Ray or over HTTP."""

from __future__ import annotations

import json
from typing import Any

from deltawire.engines.vllm import rank
from deltawire.engines.vllm.settings import parse


class DeltawireWorker:
    """Mixed into vLLM's worker. Every answer is a dictionary with ``failure``, empty if all is
    well; arguments may come as the strings that vLLM's HTTP call passes on."""

    def deltawire_open(self, settings: dict[str, Any] | str) -> dict[str, Any]:
        """Open a run and load its newest version; ``settings`` are the members of `Settings`."""
        values = json.loads(settings) if isinstance(settings, str) else settings
        return rank.open_run(self, parse(values, where="settings"))

    def deltawire_prepare(self, version: int | str) -> dict[str, Any]:
        """Begin to prepare a version; returns at once."""
        return rank.prepare(self, int(version))

    def deltawire_status(self) -> dict[str, Any]:
        """What this rank serves and prepares."""
        return rank.status(self)

    def deltawire_swap(self, version: int | str) -> dict[str, Any]:
        """Swap to a prepared version, on all ranks or on none: call it on all of them."""
        return rank.swap(self, int(version))

    def deltawire_attest(self) -> dict[str, Any]:
        """Digest the live bits."""
        return rank.attest(self)

    def deltawire_mend(self) -> dict[str, Any]:
        """Write the mirror's bits over live ones that are others."""
        return rank.mend(self)

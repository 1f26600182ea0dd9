"""Labels SGLang's requests at a swap, keys cached prefixes, and treats sequences that run.

SGLang finds cached keys and values by the preceding tokens and the ``extra_key`` of a request.
"""

from __future__ import annotations

from typing import Any

from deltawire.engines.following.prefix_salt import resalt
from deltawire.engines.following.settings import InFlight as Mode

DONE = object()
"""Stands in the queue of results for one that a swap has processed already."""


class InFlight:
    """The requests of ``scheduler``, and what ``mode`` does to those that run at a swap."""

    def __init__(self, scheduler: Any, mode: Mode) -> None:
        self._scheduler = scheduler
        self._mode = mode
        self._epoch = ""
        self.draining = False

    def ready(self) -> bool:
        """Returns whether a swap may happen; with ``drain``, none while a sequence runs, and no
        new one is started until then."""
        self.draining = self._mode == "drain"
        if self.draining and any(not one.finished() for one in self._running()):
            return False
        self._process_results()
        return True

    def relabel(self, version: str, epoch: str) -> None:
        """Labels what is drawn from here on with ``version``, whose weights ``epoch`` names."""
        self._epoch = epoch
        self._scheduler.record_weight_version_change(new_version=version)
        if self._mode == "recompute":
            self._retract()
        for request in self._scheduler.waiting_queue:
            self.salt(request)

    def salt(self, request: Any) -> None:
        """Has a request that holds no keys and values find cached prefixes of this version only."""
        if not request.kv.holds_kv:
            resalt(request, "extra_key", self._epoch)

    def _running(self) -> set[Any]:
        found: set[Any] = self._scheduler.collect_inflight_reqs()
        chunked = self._scheduler.chunked_req
        return found if chunked is None else {*found, chunked}

    def _process_results(self) -> None:
        """Processes the results of steps that are done and not yet processed: their tokens are the
        old version's. With the overlapped schedule there is one such step."""
        queue = getattr(self._scheduler, "result_queue", None)
        for place in range(len(queue or ())):
            batch, result = queue[place]  # type: ignore[index]
            if result is not DONE:
                self._scheduler.process_batch_result(batch, result)
                queue[place] = (batch, DONE)  # type: ignore[index]

    def _retract(self) -> None:
        """Has the sequences that run computed again, by SGLang's own pause and its end."""
        from sglang.srt.managers.io_struct import (
            ContinueGenerationReqInput,
            PauseGenerationReqInput,
        )

        if self._scheduler._engine_paused or not self._running():
            return
        self._scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
        self._scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))

"""Moves one rank of SGLang from version to version, in its scheduler's process."""

from __future__ import annotations

import logging
from typing import Any

from deltawire.engines.following.rank_group import RankGroup
from deltawire.engines.following.rank_reports import report_rank
from deltawire.engines.following.rank_weights import RankWeights
from deltawire.engines.following.replicated_controller import ReplicatedController
from deltawire.engines.following.settings import FollowSettings
from deltawire.engines.sglang.in_flight import InFlight
from deltawire.engines.sglang.opening import check_tensors
from deltawire.engines.sglang.refusals import refuse, refuse_arguments


class RankController(ReplicatedController):
    """Follows a run on this rank of ``scheduler``; all ranks construct it together.

    Raises `InputError` for arguments of the server that it does not support, and what
    `ReplicatedController` raises.
    """

    ENGINE = "sglang"

    def __init__(self, scheduler: Any, settings: FollowSettings) -> None:
        refuse_arguments(scheduler.server_args)
        self._scheduler = scheduler
        self.in_flight = InFlight(scheduler, settings.in_flight)
        group = scheduler.tp_group
        peers = RankGroup(group.cpu_group, group.rank_in_group, group.world_size)
        super().__init__(settings, peers)

    def open_rank(self, settings: FollowSettings) -> RankWeights:
        """See `ReplicatedController.open_rank`."""
        model = self._scheduler.tp_worker.model_runner.model
        rank = RankWeights(
            model,
            settings,
            self.peers,
            refuse=lambda placement: refuse(model, placement),
            open_slot=lambda _, run: check_tensors(run.tensors),
        )
        report_rank(model, rank, self.ENGINE)
        return rank

    def wake(self) -> None:
        """Does nothing: the scheduler's loop looks for requests at least once a second."""

    def may_swap(self) -> bool:
        """See `SwapController.may_swap`."""
        return self.in_flight.ready()

    def resume(self) -> None:
        """See `SwapController.resume`."""
        self.in_flight.resume()

    def label(self, answers: list[dict[str, Any]]) -> None:
        """See `SwapController.label`."""
        del answers
        self.in_flight.relabel(str(self.version), self.epoch)

    def warn(self, text: str) -> None:
        """See `SwapController.warn`."""
        logging.getLogger("sglang.deltawire").warning("%s", text)

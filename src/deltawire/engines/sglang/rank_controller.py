"""Moves one rank of SGLang from version to version, in its scheduler's process."""

from __future__ import annotations

from typing import Any

from deltawire.engines.following.rank_group import RankGroup
from deltawire.engines.following.refusals import refuse_untested
from deltawire.engines.following.replicated_controller import ReplicatedController
from deltawire.engines.following.settings import FollowSettings
from deltawire.engines.sglang.in_flight import InFlight
from deltawire.engines.sglang.refusals import TESTED, refuse


class RankController(ReplicatedController):
    """Follows a run on this rank of ``scheduler``; all ranks construct it together.

    Raises `InputError` for arguments of the server that it does not support, and what
    `ReplicatedController` raises.
    """

    ENGINE = "sglang"
    refuse = staticmethod(refuse)

    def __init__(self, scheduler: Any, settings: FollowSettings) -> None:
        refuse_untested("SGLang", scheduler.server_args, TESTED)
        self.in_flight = InFlight(scheduler, settings.in_flight)
        group = scheduler.tp_group
        peers = RankGroup(group.cpu_group, group.rank_in_group, group.world_size)
        super().__init__(settings, peers, scheduler.tp_worker.model_runner.model)

    def wake(self) -> None:
        """Does nothing: the scheduler's loop looks for requests at least once a second."""

    def may_swap(self) -> bool:
        """See `SwapController.may_swap`."""
        return self.in_flight.ready()

    def resume(self) -> None:
        """See `SwapController.resume`."""
        self.in_flight.draining = False

    def label(self, answers: list[dict[str, Any]]) -> None:
        """See `SwapController.label`."""
        del answers
        self.in_flight.relabel(str(self.version), self.epoch)

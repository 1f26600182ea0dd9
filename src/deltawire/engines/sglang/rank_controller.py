"""Moves one rank of SGLang from version to version; all ranks do the same between the same steps.

Concurrency::

    rank 0's watching thread        rank 0's scheduler              every rank's scheduler
      newest version ─▶ wanted ──▶    adds a `Command` to the ────▶   the same command in the
                                      requests of this pass           same pass: one piece of work,
                                                                      then the next step

Each rank has a scheduler process. Rank 0 reads requests and broadcasts them, so a command that it
adds reaches all ranks before the same step. They exchange their answers there, and so decide alike.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from deltawire.engines.following.rank_group import RankGroup
from deltawire.engines.following.rank_weights import RankWeights
from deltawire.engines.following.settings import FollowSettings
from deltawire.engines.following.swap_controller import SwapController
from deltawire.engines.following.version_watcher import VersionWatcher
from deltawire.engines.sglang.adapters import refuse_adapter_tensors
from deltawire.engines.sglang.in_flight import InFlight
from deltawire.engines.sglang.refusals import refuse, refuse_arguments
from deltawire.errors import DeltawireError
from deltawire.store import Bucket

logger = logging.getLogger("sglang.deltawire")


class Command(msgspec.Struct, frozen=True):
    """One piece of work for all ranks: towards version ``wanted``, or a check of the live bits."""

    wanted: int
    attest: bool


class _Newest:
    """Stands for the controller in the watching thread, so that ``wanted`` changes on all ranks in
    the same pass only."""

    def __init__(self, controller: SwapController) -> None:
        self.wanted = self.taken = controller.wanted
        self._controller = controller

    def busy(self) -> bool:
        """See `version_watcher.Controller`."""
        return self._controller.busy()

    def wake(self) -> None:
        """Does nothing: see `RankController.wake`."""


class RankController(SwapController):
    """Follows a run on this rank of ``scheduler``; all ranks construct it together.

    Raises `InputError` for arguments of the server that it does not support, and the errors of
    opening the run. The newest version is loaded and attested when it returns.
    """

    def __init__(self, scheduler: Any, settings: FollowSettings) -> None:
        super().__init__(settings)
        refuse_arguments(scheduler.server_args)
        group = scheduler.tp_group
        self.peers = RankGroup(group.cpu_group, group.rank_in_group, group.world_size)
        self._scheduler = scheduler
        self._in_flight = InFlight(scheduler, settings.in_flight)
        self._rank: RankWeights | None = None
        self._newest = _Newest(self)
        self.last_attested: dict[str, Any] = {}
        self.open(settings)

    def commands(self) -> list[Command]:
        """On rank 0: what to add to the requests of this pass."""
        if self._newest.wanted != self._newest.taken:
            self._newest.taken = self.wanted = self._newest.wanted
        return [Command(self.wanted, self.attest_is_due())] if self.due() else []

    def handle(self, command: Command) -> None:
        """Does what rank 0 asked for, between two steps."""
        self.wanted = command.wanted
        self.advance(attest=command.attest)

    def want(self, version: int | str) -> dict[str, Any]:
        """See `SwapController.want`; called on all ranks."""
        self._newest.taken = self._newest.wanted = int(version)
        return super().want(version)

    def attest(self) -> dict[str, Any]:
        """See `SwapController.attest`; keeps the outcome, for the next status."""
        self.last_attested = super().attest()
        return self.last_attested

    @property
    def draining(self) -> bool:
        """True while a swap waits for the sequences that run."""
        return self._in_flight.draining

    def salt(self, request: Any) -> None:
        """Has a request that holds no keys and values find cached prefixes of this version only."""
        self._in_flight.salt(request, self.epoch)

    # Methods that `SwapController` needs.

    def call_ranks(self, method: str, *args: Any) -> list[dict[str, Any]]:
        """See `SwapController.call_ranks`; all ranks call it together."""
        try:
            own = self._do(method, *args)
        except DeltawireError as error:
            own = {"failure": str(error)}
        return self.peers.gather_structs(own)

    def follow(self, settings: FollowSettings) -> None:
        """See `SwapController.follow`: rank 0 polls for all."""
        self._newest.wanted = self._newest.taken = self.wanted
        if self.peers.number == 0:
            super().follow(settings)

    def watcher(self, bucket: Bucket, settings: FollowSettings) -> VersionWatcher:
        """See `SwapController.watcher`."""
        return VersionWatcher(
            self._newest, bucket, polling=settings.follow, public_key=settings.public_key
        )

    def wake(self) -> None:
        """Does nothing: the scheduler's loop looks for requests at least once a second."""

    def may_swap(self) -> bool:
        """See `SwapController.may_swap`."""
        return self._in_flight.ready()

    def resume(self) -> None:
        """See `SwapController.resume`."""
        self._in_flight.resume()

    def label(self, answers: list[dict[str, Any]]) -> None:
        """See `SwapController.label`."""
        del answers
        self._in_flight.relabel(str(self.version), self.epoch)

    def warn(self, text: str) -> None:
        """See `SwapController.warn`."""
        logger.warning("%s", text)

    def _do(self, method: str, *args: Any) -> dict[str, Any]:
        if method == "open":
            self._rank = self._opened(*args)
            return self._rank.status()
        assert self._rank is not None
        if method == "prepare":
            self._rank.prepare(*args)
            return self._rank.status()
        answer: dict[str, Any] = getattr(self._rank, method)(*args)
        return answer

    def _opened(self, settings: FollowSettings) -> RankWeights:
        model = self._scheduler.tp_worker.model_runner.model
        return RankWeights(
            model,
            settings,
            self.peers,
            refuse=lambda placement: refuse(model, placement),
            open_slot=lambda _, run: refuse_adapter_tensors(run.tensors),
        )

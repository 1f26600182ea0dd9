"""Moves an engine whose ranks each have a loop, and see the same requests in each pass.

Concurrency::

    rank 0's watching thread        rank 0's loop                   every rank's loop
      newest version ─▶ wanted ──▶    adds a `Command` to the ────▶   the same command in the
                                      requests of this pass           same pass: one piece of work,
                                                                      then the next step

Each rank has a controller. Rank 0 reads requests and broadcasts them, so a command that it adds
reaches all ranks before the same step. They exchange their answers there, and so decide alike.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from typing import Any

import msgspec
import torch

from deltawire.engines.following.rank_group import RankGroup
from deltawire.engines.following.rank_reports import report_rank
from deltawire.engines.following.rank_weights import RankWeights
from deltawire.engines.following.settings import FollowSettings
from deltawire.engines.following.swap_controller import SwapController
from deltawire.engines.following.version_watcher import VersionWatcher
from deltawire.engines.registry import check_tensors
from deltawire.errors import DeltawireError
from deltawire.placement.placement import Placement
from deltawire.store import Bucket


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
        """Wakes the loop."""
        self._controller.wake()


class ReplicatedController(SwapController):
    """Follows a run on this rank, ``peers.number``, whose part of the weights ``model`` holds; all
    ranks construct it together.

    The newest version is loaded and attested when it returns. Raises the errors of opening the run.
    An engine's own class prepares what its methods need before this is called.
    """

    def __init__(self, settings: FollowSettings, peers: RankGroup, model: torch.nn.Module) -> None:
        super().__init__(settings)
        self.peers = peers
        self._model = model
        self.last_attested: dict[str, Any] = {}
        self._rank: RankWeights | None = None
        self._newest = _Newest(self)
        self.open(settings)

    @staticmethod
    @abstractmethod
    def refuse(model: torch.nn.Module, placement: Placement) -> None:
        """Raises `InputError` if the engine could serve weights that are not the run's."""

    def warn(self, text: str) -> None:
        """See `SwapController.warn`."""
        logging.getLogger(f"{self.ENGINE}.deltawire").warning("%s", text)

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

    def call_ranks(self, method: str, *args: Any) -> list[dict[str, Any]]:
        """See `SwapController.call_ranks`; all ranks call it together."""
        try:
            own = self._do(method, *args)
        except DeltawireError as error:
            own = {"failure": str(error)}
        return self.peers.gather_structs(own)

    def _do(self, method: str, *args: Any) -> dict[str, Any]:
        if method == "open":
            self._rank = self._open_rank(*args)
            return self._rank.status()
        assert self._rank is not None
        if method == "prepare":
            self._rank.prepare(*args)
            return self._rank.status()
        answer: dict[str, Any] = getattr(self._rank, method)(*args)
        return answer

    def _open_rank(self, settings: FollowSettings) -> RankWeights:
        rank = RankWeights(
            self._model,
            settings,
            self.peers,
            refuse=lambda placement: self.refuse(self._model, placement),
            open_slot=lambda _, run: check_tensors(self.ENGINE, run.tensors),
        )
        report_rank(self._model, rank, self.ENGINE)
        return rank

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

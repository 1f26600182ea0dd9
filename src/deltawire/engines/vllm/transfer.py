"""Implements vLLM's weight-transfer calls on one worker, for ``{"backend": "deltawire"}``.

::

    init_weight_transfer_engine  {"run": "s3://…", …}   the members of `FollowSettings`
    start_weight_update
    update_weights               {"version": 7, "wait": false}   start preparing; serving continues
    update_weights               {"version": 7}                  prepare, or wait until prepared
    finish_weight_update                                         swap, on all ranks or on none

The caller pauses vLLM before ``finish_weight_update`` and resumes it afterwards, as with any
backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from deltawire.engines.following.settings import FollowSettings, parse
from deltawire.engines.vllm import rank_calls
from deltawire.errors import InputError, ResyncError


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The content of ``init_info``: the members of `FollowSettings`."""

    settings: FollowSettings


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The version to prepare, and whether to wait until it is prepared."""

    version: int
    wait: bool = True


class DeltawireTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """One worker's side of a weight transfer from a bucket."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._wanted: int | None = None

    def parse_init_info(self, init_dict: dict[str, Any]) -> InitInfo:
        """Validates ``init_info``; raises `InputError`."""
        return InitInfo(parse(init_dict, where="init_info"))

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Opens the run and loads its newest version into the live weights."""
        opened = rank_calls.open_rank(self.model, self.vllm_config, init_info.settings)
        rank_calls.keep_rank(self.model, opened)

    def start_weight_update(self) -> None:
        """Drops an earlier request; no weights are written until `finish_weight_update`."""
        self._wanted = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Prepares a version while another is served."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Prepares a version; raises `ResyncError` if that failed."""
        held = rank_calls.rank_of(self.model)
        held.prepare(int(update_info.version))
        self._wanted = int(update_info.version)
        if update_info.wait:
            held.wait()
            _raise_if_failed(held.status())

    def finish_weight_update(self) -> None:
        """Swaps on all ranks or on none; raises `ResyncError` if none did."""
        if self._wanted is None:
            raise InputError(
                "finish_weight_update came before update_weights",
                hint='call update_weights with {"version": N} first',
            )
        held = rank_calls.rank_of(self.model)
        held.wait()
        _raise_if_failed(held.swap(self._wanted))

    def shutdown(self) -> None:
        """Does nothing: the served weights stay."""


def _raise_if_failed(answer: dict[str, Any]) -> None:
    if answer["failure"]:
        raise ResyncError(answer["failure"])

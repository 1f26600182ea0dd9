"""Functions that vLLM calls on its workers, whose first argument is the worker or its wrapper."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from deltawire.engines.following.rank_group import RankGroup
from deltawire.engines.following.rank_reports import report_rank
from deltawire.engines.following.rank_weights import Answer, RankWeights
from deltawire.engines.following.settings import FollowSettings
from deltawire.engines.vllm.adapter_names import adapter_tensors
from deltawire.engines.vllm.adapter_slot import AdapterSlot, read_settings
from deltawire.engines.vllm.refusals import refuse
from deltawire.errors import DeltawireError, InputError
from deltawire.store import Bucket
from deltawire.wire.run import Run

_RANK = "_deltawire_rank"
"""The attribute of a model that holds its `RankWeights`: some callers have only the model."""


def keep_rank(model: torch.nn.Module, rank: RankWeights) -> None:
    """Stores ``rank`` with its model, for `rank_of`."""
    model.__dict__[_RANK] = rank


def rank_of(model: torch.nn.Module) -> RankWeights:
    """Returns the rank of a model; raises `InputError` if no run is open."""
    held = model.__dict__.get(_RANK)
    if held is None:
        raise InputError("no run is open on this worker")
    assert isinstance(held, RankWeights)
    return held


def _rank_on(worker: Any) -> RankWeights:
    return rank_of((getattr(worker, "worker", None) or worker).get_model())


def _answer(call: Any) -> Answer:
    try:
        answer: Answer = call()
        return answer
    except DeltawireError as error:
        return {"failure": str(error)}


def open_run(worker: Any, settings: FollowSettings) -> Answer:
    """Opens a run on this worker and loads its newest version; call it on all workers."""
    inner = getattr(worker, "worker", None) or worker

    def call() -> Answer:
        model = inner.get_model()
        keep_rank(model, open_rank(model, inner.vllm_config, settings))
        return status(worker)

    return _answer(call)


def open_rank(model: torch.nn.Module, vllm_config: Any, settings: FollowSettings) -> RankWeights:
    """Opens the rank of this process, in vLLM's own process group."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import get_world_group

    group = get_world_group()
    rank = RankWeights(
        model,
        settings,
        RankGroup(group.cpu_group, group.rank_in_group, group.world_size),
        refuse=lambda placement: refuse(model, placement),
        open_slot=lambda bucket, run: _open_slot(model, bucket, run),
        context=_Reentered(lambda: set_current_vllm_config(vllm_config)),
    )
    report_rank(model, rank, "vllm")
    return rank


def _open_slot(model: torch.nn.Module, bucket: Bucket, run: Run) -> AdapterSlot | None:
    if not adapter_tensors(run.tensors):
        return None
    return AdapterSlot(model, run.tensors, read_settings(bucket, run))


class _Reentered(AbstractContextManager[Any]):
    """Makes a context manager reusable by making a new one for each entry."""

    def __init__(self, make: Any) -> None:
        self._make = make
        self._held: list[Any] = []

    def __enter__(self) -> None:
        self._held.append(self._make())
        self._held[-1].__enter__()

    def __exit__(self, *error: Any) -> None:
        self._held.pop().__exit__(*error)


def prepare(worker: Any, version: int) -> Answer:
    """Starts preparing ``version``."""

    def call() -> Answer:
        _rank_on(worker).prepare(version)
        return status(worker)

    return _answer(call)


def status(worker: Any) -> Answer:
    """Returns the rank's status."""
    return _answer(lambda: _rank_on(worker).status())


def swap(worker: Any, version: int) -> Answer:
    """Swaps to ``version``; call it on all workers."""
    return _answer(lambda: _rank_on(worker).swap(version))


def attest(worker: Any) -> Answer:
    """Compares the live bits with the version's."""
    return _answer(lambda: _rank_on(worker).attest())


def repair(worker: Any) -> Answer:
    """Writes the version's bits again; call it on all workers."""
    return _answer(lambda: _rank_on(worker).repair())


CALLS = {
    "open": open_run, "prepare": prepare, "status": status, "swap": swap, "attest": attest,
    "repair": repair,
}  # fmt: skip
"""The functions by the names that `SwapController.call_ranks` gives them."""

"""Digests the live weights of a vLLM engine whose weights another system updates: attest-only mode.

Start vLLM with ``--worker-extension-cls deltawire.engines.vllm.attesting.AttestWorker``. On a CPU
its packing kernels are then replaced, as they drop the weights as loaded; on a GPU nothing is. No
run is followed, and no weight is written. All ranks answer one call of ``/collective_rpc``, which
vLLM's workers serve one after the other with its own updates, so no update happens in a pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from types import MethodType
from typing import Any

import msgspec
import torch

from deltawire.codec import Digest
from deltawire.engines.following.parameter_sums import changes_after_loading, since_loading
from deltawire.engines.live_parts import AttestRequest, LivePart, RankParts
from deltawire.errors import DeltawireError, InputError
from deltawire.placement.placement import Placement, Region, probe
from deltawire.placement.reading import read_regions

NOT_OBSERVED = "what vLLM changed after loading was not observed"
UNKNOWN_NAME = ("the loader fails: KeyError", "no module or parameter named")
"""Loaders of the engine fail with these texts if they do not know a name."""
NOT_EXACT = "it is scaled or narrowed for the engine, so its bits cannot be read back"


Read = dict[str, list[tuple[Region, Digest | None]]]
"""By live tensor of which regions cover all elements: the digests of the regions of its memory."""


class AttestWorker:
    """Mixed into vLLM's worker class."""

    def deltawire_live_digests(self, request: str) -> dict[str, Any]:
        """Digests what this rank holds of the tensors of an `AttestRequest` in JSON."""
        from vllm.config import set_current_vllm_config

        worker: Any = self
        config = worker.vllm_config
        draft_config = getattr(config.speculative_config, "draft_model_config", None)
        answer = answer_of(
            worker.get_model(),
            request,
            worker.rank,
            context=lambda: set_current_vllm_config(config),
            draft=getattr(getattr(worker.model_runner, "drafter", None), "model", None),
            # A multi-token head is loaded from the model's checkpoint. Other drafts have their own,
            # in which names such as model.layers.0 mean other tensors.
            one_checkpoint=getattr(draft_config, "model", "") == config.model_config.model,
        )
        found: dict[str, Any] = msgspec.to_builtins(answer)
        return found


class OnInstances:
    """A method that a class does not show, only its instances do. vLLM refuses to start if its
    worker class shows a method of the worker extension, which may be `AttestWorker` too."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def __get__(self, instance: Any, owner: type) -> Any:
        """Returns the bound method; raises `AttributeError` for the class."""
        if instance is None:
            raise AttributeError(f"{owner.__name__} has it on its instances only")
        return MethodType(self._method, instance)


def answer_of(
    model: torch.nn.Module,
    request: str,
    rank: int,
    *,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    draft: torch.nn.Module | None = None,
    one_checkpoint: bool = False,
) -> RankParts:
    """Returns a rank's answer. An error is its ``failure``: an exception would end the worker.

    ``context`` makes what is entered around a call of a model's own loader. A ``draft`` model that
    is loaded from ``one_checkpoint`` with the model is read as the model is; the parameters of
    another one count as uncovered, because no digest reads them.
    """
    began = time.perf_counter()
    try:
        asked = msgspec.json.decode(request, type=AttestRequest)
        if any(held.is_meta for held in model.parameters()):
            return RankParts(rank=rank, updating=True)
        answer, read = _read(model, asked, rank, context)
        draft_read: Read = {}
        if draft is not None and draft is not model:
            answer, draft_read = _with_draft(
                answer, draft, asked, context if one_checkpoint else None
            )
        else:
            draft = None
        if asked.since_loading:
            answer = _with_age(
                answer, (model, read), None if draft is None else (draft, draft_read)
            )
    except DeltawireError as error:
        return RankParts(rank=rank, failure=str(error))
    except Exception as error:
        return RankParts(rank=rank, failure=f"{type(error).__name__}: {str(error)[:500]}")
    return msgspec.structs.replace(answer, seconds=time.perf_counter() - began)


def _with_age(
    answer: RankParts,
    whole: tuple[torch.nn.Module, Read],
    drafted: tuple[torch.nn.Module, Read] | None,
) -> RankParts:
    """Adds which parameters still have the bits that they were loaded with. A draft shares some of
    the model's own."""
    untouched, updated = since_loading(*whole)
    if drafted is not None:
        shared = {id(held) for held in whole[0].parameters()}
        own = {n for n, held in drafted[0].named_parameters() if id(held) not in shared}
        names, changed = since_loading(*drafted)
        untouched += [f"draft: {name}" for name in names if name in own]
        updated = updated or changed
    return msgspec.structs.replace(answer, untouched=untouched, updated=updated)


def _with_draft(
    answer: RankParts,
    draft: torch.nn.Module,
    asked: AttestRequest,
    context: Callable[[], AbstractContextManager[Any]] | None,
) -> tuple[RankParts, Read]:
    """Adds what a draft model holds; without a ``context`` only the names of its parameters. Also
    returns what was read of the draft's own.

    A tensor that the model knows, and does not only copy, is not readable in the draft either: one
    copy says nothing of the other.
    """
    read = RankParts(uncovered={n: tensor.numel() for n, tensor in draft.named_parameters()})
    found: Read = {}
    if context is not None:
        with suppress(InputError):  # Its loader cannot be observed.
            read, found = _read(draft, asked, answer.rank, context)
    names = {asked.tensors[part.tensor].name for part in read.parts}
    unplaced = {
        name: why
        for name, why in answer.unplaced.items()
        if name not in names or not any(text in why for text in UNKNOWN_NAME)
    }
    parts = [
        msgspec.structs.replace(part, digest="", reason=why, impossible=False)
        if (why := unplaced.get(asked.tensors[part.tensor].name))
        else part
        for part in read.parts
    ]
    uncovered = answer.uncovered | {f"draft: {n}": count for n, count in read.uncovered.items()}
    parts = [*answer.parts, *parts]
    together = RankParts(rank=answer.rank, parts=parts, unplaced=unplaced, uncovered=uncovered)
    return together, found


def _read(
    model: torch.nn.Module,
    asked: AttestRequest,
    rank: int,
    context: Callable[[], AbstractContextManager[Any]],
) -> tuple[RankParts, Read]:
    loader: Any = getattr(model, "load_weights", None)
    if loader is None:
        raise InputError(f"{type(model).__name__} has no load_weights to observe")
    live: dict[str, torch.Tensor] = dict(model.named_buffers(remove_duplicate=False))
    live |= dict(model.named_parameters(remove_duplicate=False))
    with context():
        placement = probe(loader, asked.tensors, live, aliases=asked.aliases)
    odd = _changed(placement, changes_after_loading(model))
    parts = []
    found: dict[int, list[tuple[Region, Digest | None]]] = {}
    for region, digest in read_regions(placement, live):
        found.setdefault(region.storage, []).append((region, digest))
        reason = odd.get(region.storage, "") if odd is not None else NOT_OBSERVED
        reason = reason or ("" if region.exact else NOT_EXACT)
        parts.append(_part(region, "" if reason or digest is None else digest.hex(), reason))
    sizes = {n: held.numel() for n, held in model.named_parameters(remove_duplicate=False)}
    uncovered = {n: count for n, count in placement.uncovered.items() if sizes.get(n) == count}
    answer = RankParts(rank=rank, parts=parts, unplaced=placement.unplaced, uncovered=uncovered)
    whole = {number for number, held in found.items() if all(one is not None for _, one in held)}
    covered = [one for one in placement.live if one.name not in placement.uncovered]
    return answer, {one.name: found[one.storage] for one in covered if one.storage in whole}


def _part(region: Region, digest: str, reason: str) -> LivePart:
    found = region.map
    return LivePart(
        region.tensor,
        found.source,
        found.shape,
        found.source_strides,
        digest,
        reason,
        impossible=not digest and not reason,
    )


def _changed(placement: Placement, changes: dict[str, str] | None) -> dict[int, str] | None:
    """Returns why storages are not readable, by number; None if that was not observed."""
    if changes is None:
        return None
    return {
        one.storage: f"after loading, vLLM changed {one.name} for its kernels: it {how}"
        for one in placement.live
        if (how := changes.get(one.name))
    }

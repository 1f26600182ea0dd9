"""Digests the live weights of one rank of an engine, whatever wrote them.

Where the elements of the reference lie is found by running the engine's own loader on tensors
without memory. Nothing is written, and no run is followed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import msgspec
import torch

from deltawire.codec import Digest
from deltawire.engines.following.parameter_sums import changes_after_loading, since_loading
from deltawire.engines.live_parts import AttestRequest, LivePart, RankParts
from deltawire.errors import DeltawireError, InputError
from deltawire.placement.placement import Placement, Region, probe
from deltawire.placement.reading import read_regions

NOT_OBSERVED = "what the engine changed after loading was not observed"
UNKNOWN_NAME = ("the loader fails: KeyError", "no module or parameter named")
"""Loaders of the engine fail with these texts if they do not know a name."""
NOT_EXACT = "it is scaled or narrowed for the engine, so its bits cannot be read back"

ABSORBED = "kv_b_proj"
"""The matrix from which engines derive those that latent attention multiplies with."""
DERIVED = frozenset({
    "W_UK_T", "W_UV", "W_UK_T_dcp_qrep", "W_K", "W_K_scale", "W_V", "W_V_scale", "w_kc", "w_vc",
})  # fmt: skip
"""Their names in vLLM and SGLang: views of it, or copies that an update may not reach."""


Read = dict[str, list[tuple[Region, Digest | None]]]
"""By live tensor of which regions cover all elements: the digests of the regions of its memory."""


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
    if odd is not None and (copy := _derived_copy(model, placement, live)):
        odd |= {
            one.storage: f"the engine computes with {copy}, a copy derived from it"
            for one in placement.live
            if ABSORBED in one.name.split(".")
        }
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
        one.storage: f"after loading, the engine changed {one.name} for its kernels: it {how}"
        for one in placement.live
        if (how := changes.get(one.name))
    }


def _derived_copy(
    model: torch.nn.Module, placement: Placement, live: Mapping[str, torch.Tensor]
) -> str:
    """Returns the name of a matrix of latent attention that is no view of loaded memory; empty if
    there is none. No digest shows whether an update reached it."""
    for name in placement.uncovered:
        if name.rpartition(".")[2] in DERIVED:
            return name
    loaded = {held.untyped_storage().data_ptr() for held in live.values()}
    for name, module in model.named_modules():
        for one in sorted(vars(module).keys() & DERIVED):
            held = vars(module)[one]
            if torch.is_tensor(held) and held.untyped_storage().data_ptr() not in loaded:
                return f"{name}.{one}"
    return ""

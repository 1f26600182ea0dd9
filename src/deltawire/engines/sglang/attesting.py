"""Digests the live weights of an SGLang engine whose weights another system updates.

Start SGLang with ``DELTAWIRE_ATTEST=1``. A look is an action of SGLang's own ``/weights_checker``,
which its schedulers serve between two steps and between its own updates, and which its admin key
guards. No run is followed, and no weight is written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from deltawire.engines.following.parameter_sums import observed
from deltawire.engines.following.rank_group import RankGroup
from deltawire.engines.live_digests import answer_of
from deltawire.engines.live_parts import METHOD, EngineParts, RankParts
from deltawire.engines.sglang.hooks import (
    LOADER,
    UPDATER,
    after_random_load,
    after_random_weights,
    require_applied,
)

RELEASED = "weights"
"""SGLang's tag of weights whose memory was given back for the time being."""


def install() -> None:
    """Registers the hooks that observe what SGLang changes after loading, and that answer."""
    import sglang
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    targets: dict[str, tuple[Callable[..., Any], HookType]] = {
        f"{UPDATER}.check_weights": (around_check, HookType.AROUND),
        f"{LOADER}.DefaultModelLoader.postprocess_weights": (observed, HookType.AROUND),
        f"{LOADER}.initialize_dummy_weights": (after_random_weights, HookType.AFTER),
        f"{LOADER}.DummyModelLoader.load_model": (after_random_load, HookType.AFTER),
    }
    for target, (hook, kind) in targets.items():
        HookRegistry.register(target, hook, kind)
    require_applied(HookRegistry, sorted(targets), version=sglang.__version__)


def around_check(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """Answers on all ranks of the engine together if the action is a look; rank 0's answer, which
    is sent, holds those of all."""
    method, _, asked = request.action.partition(" ")
    if method != METHOD:
        return original(updater, request)
    from sglang.srt.managers.io_struct import CheckWeightsReqOutput

    group = updater.tp_cpu_group
    peers = RankGroup(group, group.rank(), group.size())
    try:
        answer = _answer(updater, asked, peers.number)
    except Exception as error:  # The other ranks wait for an answer of this one.
        answer = RankParts(rank=peers.number, failure=f"{type(error).__name__}: {error}"[:1000])
    answers = peers.gather_structs(answer)
    # SGLang joins the messages of data-parallel ranks by " | ".
    text = msgspec.json.encode(EngineParts(answers)).decode().replace("|", "\\u007c")
    return CheckWeightsReqOutput(success=True, message=text)


def _answer(updater: Any, asked: str, rank: int) -> RankParts:
    if getattr(updater, "_session", None) is not None or RELEASED in updater.offload_tags:
        return RankParts(rank=rank, updating=True)
    target = updater.tp_worker.model_runner
    drafts = [] if updater.draft_worker is None else updater.draft_worker.weight_update_runners()
    if len(drafts) > 1:  # The others would not be looked at, and their weights may be old.
        return RankParts(rank=rank, failure=f"{len(drafts)} drafts are not readable, only one")
    draft = drafts[0][1] if drafts else None
    return answer_of(
        target.model,
        asked,
        rank,
        draft=None if draft is None else draft.model,
        # A multi-token head is loaded from the model's checkpoint; other drafts have their own.
        one_checkpoint=draft is not None
        and draft.model_config.model_path == target.model_config.model_path,
    )

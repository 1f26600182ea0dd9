"""Defines what an engine that attests is asked for, and what each of its ranks answers."""

from __future__ import annotations

import os
from typing import Annotated

import msgspec
from msgspec import Meta

from deltawire.wire.run import MAX_ELEMENTS, MAX_TENSORS, Name, TensorSpec

METHOD = "deltawire_live_digests"
"""The method of vLLM's workers that `AttestRequest` is sent to, over ``/collective_rpc``; before a
request, the action of SGLang's ``/weights_checker``."""

ATTEST = "DELTAWIRE_ATTEST"
"""The variable that has all engines of a process answer: a framework that sets its own worker
extension leaves no other way."""

MAX_PARTS = 1 << 20

_Count = Annotated[int, Meta(ge=0, le=MAX_ELEMENTS)]
_Counts = Annotated[tuple[_Count, ...], Meta(max_length=16)]
_Text = Annotated[str, Meta(max_length=4096)]


class AttestRequest(msgspec.Struct, frozen=True):
    """The tensors of a checkpoint, and further names of tied ones.

    ``since_loading`` also asks which live parameters still have the bits that the engine loaded at
    its start.
    """

    tensors: Annotated[list[TensorSpec], Meta(max_length=MAX_TENSORS)]
    aliases: Annotated[dict[Name, Name], Meta(max_length=MAX_TENSORS)] = {}
    since_loading: bool = False


class LivePart(msgspec.Struct, frozen=True, array_like=True):
    """Elements of tensor number ``tensor`` that one live tensor holds: from ``start`` on, ``shape``
    of them with ``strides``, and their digest.

    ``reason`` says why they are not readable, and ``impossible`` that no published value gives the
    live bits; there is no digest then.
    """

    tensor: Annotated[int, Meta(ge=0, le=MAX_TENSORS)]
    start: _Count
    shape: _Counts
    strides: _Counts
    digest: Annotated[str, Meta(pattern=r"^([0-9a-f]{32})?\Z")]
    reason: _Text = ""
    impossible: bool = False


class RankParts(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of one rank.

    ``unplaced`` names tensors that the loader does not only copy, with the reason. ``uncovered``
    counts, by live parameter, the elements of those that no tensor of the request is loaded into.
    ``updating`` says that an update is under way: parameters have no memory in the middle of it.
    ``untouched`` names live parameters with the bits of the engine's start, ``updated`` says
    whether any has others.
    """

    failure: _Text = ""
    updating: bool = False
    rank: int = 0
    parts: Annotated[list[LivePart], Meta(max_length=MAX_PARTS)] = []
    unplaced: Annotated[dict[Name, _Text], Meta(max_length=MAX_TENSORS)] = {}
    uncovered: Annotated[dict[Name, int], Meta(max_length=MAX_TENSORS)] = {}
    untouched: Annotated[list[Name], Meta(max_length=MAX_TENSORS)] = []
    updated: bool = False
    seconds: float = 0.0


class EngineParts(msgspec.Struct, frozen=True):
    """The answer of vLLM: one of each rank."""

    results: Annotated[list[RankParts], Meta(min_length=1, max_length=1 << 14)]


def attests_here() -> bool:
    """Returns whether `ATTEST` is set to anything but 0."""
    return os.environ.get(ATTEST, "0") not in ("", "0")

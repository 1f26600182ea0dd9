"""Training profiles: the resolver's results as versioned data, ready for run.json."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from deltawire.errors import InputError
from deltawire.plan.accelerators import Device
from deltawire.plan.layout import Checkpointing, Mode, Offload, Optimizer, Packing, TrainingLayout

PROFILE_VERSION = 2
"""Raised whenever a field changes its meaning, so that an old profile is refused."""
MAX_BYTES = 1 << 20

Axis = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
Text = Annotated[str, msgspec.Meta(max_length=1000)]


class LayoutData(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A layout's fields as they are stored; see `TrainingLayout`."""

    data: Axis
    replicate: Axis
    tensor: Axis
    expert: Axis
    pipeline: Axis
    context_parallel: Axis
    context: Axis
    sequences: Axis
    accumulate: bool
    checkpointing: Checkpointing
    offload: Offload
    optimizer: Optimizer
    packing: Packing
    lora_rank: Annotated[int, msgspec.Meta(ge=0, le=4096)]
    lora_experts: bool
    chunk: Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]
    imbalance: Annotated[float, msgspec.Meta(ge=1, le=1e6)]


class Alternative(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The next cheaper or faster choice, or why there is none."""

    accelerators: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
    note: Text
    layout: LayoutData | None = None
    peak_with_allowance: Bytes = 0
    estimated_tokens_per_second: Amount = 0.0


class ReferencePrice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The price of one way to compute a policy's reference (`deltawire.plan.references`)."""

    mode: Literal["adapter_off", "sleeping", "process"]
    """The value of ``reference.mode`` for it."""
    device_bytes: Bytes = 0
    """Added to the peak of each of the policy's ranks."""
    host_bytes: Bytes = 0
    """Added to the host memory of each."""
    accelerators: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0
    """Further accelerators."""
    estimated_seconds_per_step: Amount = 0.0
    """Added to a micro-batch of every rank."""
    fits: bool = True
    note: Text = ""


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model's needs on given accelerators, per rank: bytes as predicted, times as estimated."""

    version: int
    name: Text
    model: Text
    mode: Mode
    parameters: Bytes
    trained_parameters: Bytes
    architecture: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
    """A hash of the model's description without its name: two models of one hash have the same
    matrices."""
    accelerator: Text
    device: Device
    """The torch device of these accelerators, empty if the table does not say it."""
    accelerators: Axis
    layout: LayoutData
    peak_phase: Text
    """The phase of a step with the largest memory."""
    bytes_per_rank: dict[str, Bytes]
    """By part in that phase; they add up to ``peak_bytes``."""
    peak_bytes: Bytes
    peak_with_allowance: Bytes
    """With an allowance for fragmentation."""
    usable_bytes: Bytes
    host_bytes_per_rank: Bytes
    binding: Text
    """The constraint that keeps the layout from being faster."""
    estimated_seconds_per_step: Amount
    estimated_tokens_per_second: Amount
    cheaper: Alternative | None = None
    faster: Alternative | None = None
    references: list[ReferencePrice] = []
    """The ways to compute a reference for this policy; the first is the resolver's choice."""
    rescoring_host_bytes: Bytes = 0
    """Host memory that re-scoring workers' groups (``trust.rescore_share``) takes in addition, once
    a run, on rank 0's machine; where it exceeds half of what is free there, only tasks, tokens and
    rewards are judged."""
    unsupported: list[Text] = []
    """The parts of the layout that deltawire's trainer does not support yet."""

    def as_layout(self) -> TrainingLayout:
        """Returns the layout that the memory model takes."""
        return TrainingLayout(mode=self.mode, **msgspec.structs.asdict(self.layout))


def encode_profile(profile: Profile) -> bytes:
    """Encodes a profile as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(profile), indent=2)


def decode_profile(raw: bytes, *, where: str) -> Profile:
    """Decodes a profile. Raises `InputError`, naming ``where``, for invalid bytes and for another
    version.
    """
    if len(raw) > MAX_BYTES:
        raise InputError(f"{where} has {len(raw):,} bytes; a profile has at most {MAX_BYTES:,}")
    try:
        version = msgspec.json.decode(raw, type=_ProfileVersion).version
        if version != PROFILE_VERSION:
            raise InputError(
                f"{where} is a profile of version {version}; this deltawire reads version "
                f"{PROFILE_VERSION}",
                hint="resolve the shape again with deltawire shapes",
            )
        return msgspec.json.decode(raw, type=Profile)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as failure:
        raise InputError(f"{where} is not a training profile: {failure}") from None


class _ProfileVersion(msgspec.Struct):
    version: int


def read_profile(path: Path) -> Profile:
    """Reads a profile from a file. Raises `InputError` if it cannot be read or is not a profile."""
    try:
        with path.open("rb") as opened:
            raw = opened.read(MAX_BYTES + 1)
    except OSError as failure:
        raise InputError(f"cannot read {path}: {failure.strerror or failure}") from None
    return decode_profile(raw, where=str(path))

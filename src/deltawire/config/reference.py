"""Section of the reference that a KL penalty, or a distillation, holds the policy against."""

from __future__ import annotations

from typing import Literal

from deltawire.config.base import Section


class ReferenceConfig(Section, frozen=True, kw_only=True):
    """The reference of ``train.loss.kl``: what it is, and where it computes."""

    mode: Literal["auto", "adapter_off", "sleeping", "process"] = "auto"
    """``adapter_off``: the policy without its adapter. ``sleeping``: a copy that the trainer keeps
    in host memory and streams to its device. ``process``: ``deltawire reference``, which writes
    log-probabilities to the bucket. ``auto`` is the first of the two former that is possible."""
    model: str = ""
    """A model directory, such as a teacher's, of the policy's vocabulary; empty is version 0."""
    device: str = ""
    """The device of the process, if not the run's."""

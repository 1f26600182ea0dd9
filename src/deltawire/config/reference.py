"""Defines the section of the reference to which a KL penalty or a distillation compares the
policy.
"""

from __future__ import annotations

from typing import Literal

from deltawire.config.base import Section


class ReferenceConfig(Section, frozen=True, kw_only=True):
    """The reference of ``train.loss.kl``: its weights, and where it computes.

    Example::

        [train.loss]
        kl = "k3"

        [reference]
        mode = "sleeping"
    """

    mode: Literal["auto", "adapter_off", "sleeping", "process"] = "auto"
    """``adapter_off``: the policy without its adapter. ``sleeping``: a copy that the trainer keeps
    in host memory and streams to its device. ``process``: ``deltawire reference``, which writes
    log-probabilities to the bucket. ``auto`` is the first of the first two that is possible.
    """
    model: str = ""
    """A model directory, such as a teacher's, with the policy's vocabulary; empty is version 0."""
    device: str = ""
    """The device of the reference process, if not the run's."""

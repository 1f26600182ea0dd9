"""Faults that tests plant on one rank of an engine that follows a run; each strikes once."""

from __future__ import annotations

import hashlib
import os
import signal

import numpy as np
import torch

from deltawire.errors import ResyncError

STAGES = {"prepare": "prepare", "swap": "swap", "scatter": "_apply", "readback": "_exchange"}
"""Where a swap can be made to fail, by the method of `PlacedWeights` that fails then."""


def plant_bit(held, number, seed):
    """Turn one bit of a live parameter on rank ``number``; says of which."""
    if held.peers.number != number:
        return {}
    rng = np.random.default_rng(seed)
    regions = held.placed.placement.regions
    region = regions[int(rng.integers(len(regions)))]
    flat = held.placed._flats[region.storage]
    flat[region.map.target] ^= 1 << int(rng.integers(16))
    return {"tensor": held.placed.placement.tensors[region.tensor].name}


def plant_failure(held, number, stage):
    """Have ``stage`` fail on rank ``number``, one of `STAGES`. After ``die-`` the rank's process is
    killed there, after ``kill-`` its whole process group."""
    if held.peers.number != number:
        return {}
    kind, _, at = stage.rpartition("-")
    placed = held.placed
    name = STAGES[at]
    original = getattr(placed, name)

    def fails(*args, **kwargs):
        if at == "scatter":
            move, begun = args
            begun.append(move)
            write_half(move)
        if kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "kill":
            os.killpg(0, signal.SIGKILL)
        if at == "readback":
            original(*args, **kwargs)
        setattr(placed, name, original)
        raise ResyncError(f"planted: {stage}")

    setattr(placed, name, fails)
    return {"planted": stage}


def write_half(move):
    """Writes what an exchange that is killed half way has written."""
    for extent in move.ranges[: (len(move.ranges) + 1) // 2]:
        own = slice(extent.first, extent.last)
        extent.live.index_copy_(0, move.index[own].long(), move.new[own])


def weigh(tensors):
    """A hash of the live bits of each tensor, by name."""
    return {
        name: hashlib.sha256(
            tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        for name, tensor in tensors.items()
    }

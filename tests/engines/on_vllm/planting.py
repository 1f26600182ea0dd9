"""A worker on which tests plant faults, as strings say over vLLM's own ``collective_rpc``."""

from __future__ import annotations

import os
import signal

import numpy as np
import torch

from deltawire.engines.vllm import rank_calls
from deltawire.engines.vllm.worker import DeltawireWorker
from deltawire.errors import ResyncError


def write_half(move):
    """Writes what an exchange that is killed half way has written."""
    for extent in move.ranges[: (len(move.ranges) + 1) // 2]:
        own = slice(extent.first, extent.last)
        extent.live.index_copy_(0, move.index[own].long(), move.new[own])


class PlantingWorker(DeltawireWorker):
    """Each fault strikes on one rank, once."""

    def _held(self):
        return rank_calls.rank_of(self.get_model())

    def plant_bit(self, number: int, seed: int):
        """Turn one bit of a live parameter on rank ``number``; says of which."""
        held = self._held()
        if held.peers.number != number:
            return {}
        rng = np.random.default_rng(seed)
        regions = held.placed.placement.regions
        region = regions[int(rng.integers(len(regions)))]
        flat = held.placed._flats[region.storage]
        flat[region.map.target] ^= 1 << int(rng.integers(16))
        return {"tensor": held.placed.placement.tensors[region.tensor].name}

    def plant_in_padding(self):
        """Write into an element of the adapter's slot that no element of the adapter lies in."""
        stacks = self._held().slot.live()
        name, stack = next((n, one) for n, one in stacks.items() if n.endswith("lora_b_stacked.0"))
        stack[..., -1] = 1.0  # The slot's rank is larger than the adapter's.
        return {"stack": name}

    def process(self):
        """The number of this rank's process."""
        return {"pid": os.getpid()}

    def plant_failure(self, number: int | str, stage: str):
        """Have ``stage`` fail on rank ``number``: prepare, swap, scatter or readback. After
        ``die-`` the rank's process is killed there, after ``kill-`` its whole process group."""
        held = self._held()
        if held.peers.number != int(number):
            return {}
        kind, _, at = stage.rpartition("-")
        placed = held.placed
        name = {
            "prepare": "prepare",
            "swap": "swap",
            "scatter": "_apply",
            "readback": "_exchange",
        }[at]
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

    def make_room_between_stages(self):
        """Where a later stage receives what an earlier one sends. vLLM 0.32 makes that in its
        warming up, which on a CPU belongs to compiling, and nothing is compiled here."""
        runner = self.model_runner
        if runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.dtype, device=runner.device
            )

    def weigh(self):
        """A hash of the live bits of every parameter and of every adapter slot, by name."""
        import hashlib

        model = self.get_model()
        held = dict(model.named_parameters())
        for name, module in model.named_modules():
            for kind in ("lora_a_stacked", "lora_b_stacked"):
                for number, stack in enumerate(getattr(module, kind, ())):
                    held[f"{name}.{kind}.{number}"] = stack
        return {
            name: hashlib.sha256(
                tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
            ).hexdigest()
            for name, tensor in held.items()
        }

"""A worker on which tests plant faults, as strings say over vLLM's own ``collective_rpc``."""

from __future__ import annotations

import os

import faults

from deltawire.engines.vllm import rank_calls
from deltawire.engines.vllm.worker import DeltawireWorker


class PlantingWorker(DeltawireWorker):
    """Each fault strikes on one rank, once; see `faults`."""

    def _held(self):
        return rank_calls.rank_of(self.get_model())

    def plant_bit(self, number: int, seed: int):
        return faults.plant_bit(self._held(), number, seed)

    def plant_failure(self, number: int | str, stage: str):
        return faults.plant_failure(self._held(), int(number), stage)

    def plant_in_padding(self):
        """Write into an element of the adapter's slot that no element of the adapter lies in."""
        stacks = self._held().slot.live()
        name, stack = next((n, one) for n, one in stacks.items() if n.endswith("lora_b_stacked.0"))
        stack[..., -1] = 1.0  # The slot's rank is larger than the adapter's.
        return {"stack": name}

    def process(self):
        """The number of this rank's process."""
        return {"pid": os.getpid()}

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
        model = self.get_model()
        held = dict(model.named_parameters())
        for name, module in model.named_modules():
            for kind in ("lora_a_stacked", "lora_b_stacked"):
                for number, stack in enumerate(getattr(module, kind, ())):
                    held[f"{name}.{kind}.{number}"] = stack
        return faults.weigh(held)

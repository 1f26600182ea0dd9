"""Reads which adapter a run holds from its tensors' names, and which of vLLM's slots it needs.

Used on both sides: in a rollout worker to start a server with a slot that fits, and in vLLM's
processes to fill it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from deltawire.config.adapters import VLLM_RANKS
from deltawire.errors import InputError
from deltawire.wire.run import TensorSpec

PREFIX = "base_model.model."
"""The beginning of each adapter tensor's name as PEFT writes it; no tensor of a base has it."""

_FACTORS = (".lora_A.weight", ".lora_B.weight")
_HINT = 'set rollout.engine = "transformers", or train.exporter = "merged"'


def adapter_tensors(tensors: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Returns the tensors of the run's adapter, if it has one."""
    return [spec for spec in tensors if spec.name.startswith(PREFIX)]


def layer_of(name: str) -> str:
    """Returns the layer that an adapter tensor belongs to, by its name in the base."""
    for factor in _FACTORS:
        name = name.removesuffix(factor)
    return name.removeprefix(PREFIX)


def slot_flags(tensors: Sequence[TensorSpec]) -> list[str]:
    """Returns the arguments that give a vLLM server one slot for the run's adapter; none if it has
    no adapter. Raises `InputError` for an adapter that vLLM cannot serve.
    """
    adapter = adapter_tensors(tensors)
    if not adapter:
        return []
    refuse_unservable(tensors)
    largest = max(spec.shape[0] for spec in adapter if spec.name.endswith(_FACTORS[0]))
    slot = next((rank for rank in VLLM_RANKS if rank >= largest), None)
    if slot is None:
        first = next(spec for spec in adapter if spec.shape[0] == largest)
        raise above_rank(first.name, largest, VLLM_RANKS[-1])
    targets = sorted({layer_of(spec.name).rpartition(".")[2] for spec in adapter})
    return [
        "--enable-lora", "--max-loras", "1", "--max-lora-rank", str(slot),
        "--lora-target-modules", *targets,
    ]  # fmt: skip


def refuse_unservable(tensors: Iterable[TensorSpec]) -> None:
    """Raises `InputError` for the first tensor of a run with an adapter that no slot takes: vLLM
    itself would drop some of them without a word."""
    for spec in tensors:
        name, last = spec.name, spec.name.rpartition(".")[2]
        if not name.startswith(PREFIX):
            if last in ("codes", "scales"):
                raise InputError(f"vLLM does not serve the packed weight {name}", hint=_HINT)
            continue
        if ".experts." in name:
            raise InputError(
                f"deltawire does not serve an adapter of experts in vLLM: {name}",
                hint=f"leave experts out of train.adapter.targets, {_HINT}",
            )
        if ".lora_embedding_" in name:
            raise InputError(
                f"deltawire does not serve an adapter of an embedding in vLLM: {name}",
                hint=f"leave it out of train.adapter.targets, {_HINT}",
            )
        if layer_of(name).rpartition(".")[2] == "lm_head":
            raise InputError(
                f"deltawire does not serve an adapter of the head in vLLM: {name}",
                hint=f"leave lm_head out of train.adapter, {_HINT}",
            )
        if not name.endswith(_FACTORS):
            raise InputError(
                f"vLLM serves no module that is trained whole next to an adapter: {name}",
                hint=f"leave train.adapter.modules_to_save empty, {_HINT}",
            )


def above_rank(name: str, rank: int, limit: int) -> InputError:
    """Returns the error of an adapter whose rank is above the slot's."""
    return InputError(
        f"the adapter's rank {rank} is above the engine's, {limit}: {name}",
        hint=f"serve with a larger --max-lora-rank (at most {VLLM_RANKS[-1]}), or train less",
    )

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

FIRST = (".lora_A.weight", ".lora_embedding_A")
"""Ends of the names of first factors, [rank, inputs]: of linear layers and the head, and of
embeddings, whose inputs are the vocabulary."""

SECOND = (".lora_B.weight", ".lora_embedding_B")
"""Ends of the names of second factors, [outputs, rank]."""

HEAD_LIMIT = 258_048
"""The largest vocabulary for which vLLM makes a slot of the head."""

_HINT = 'set rollout.engine = "transformers", or train.exporter = "merged"'


def adapter_tensors(tensors: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Returns the tensors of the run's adapter, if it has one."""
    return [spec for spec in tensors if spec.name.startswith(PREFIX)]


def layer_of(name: str) -> str:
    """Returns the layer that an adapter tensor belongs to, by its name in the base."""
    for factor in (*FIRST, *SECOND):
        name = name.removesuffix(factor)
    return name.removeprefix(PREFIX)


def rank_of(spec: TensorSpec) -> int:
    """Returns the rank of the adapter that a factor belongs to."""
    return spec.shape[0] if spec.name.endswith(FIRST) else spec.shape[1]


def vocabulary_of(spec: TensorSpec) -> int | None:
    """Returns the number of tokens that a factor of an embedding or of the head is for; None for
    other factors."""
    if spec.name.endswith(".lora_embedding_A"):
        return spec.shape[1]
    if spec.name.endswith(SECOND) and layer_of(spec.name).rpartition(".")[2] == "lm_head":
        return spec.shape[0]
    return None


def slot_flags(tensors: Sequence[TensorSpec]) -> list[str]:
    """Returns the arguments that give a vLLM server one slot for the run's adapter; none if it has
    no adapter. Raises `InputError` for an adapter that vLLM cannot serve.
    """
    adapter = adapter_tensors(tensors)
    if not adapter:
        return []
    refuse_unservable(tensors)
    largest = max(rank_of(spec) for spec in adapter)
    slot = next((rank for rank in VLLM_RANKS if rank >= largest), None)
    if slot is None:
        first = next(spec for spec in adapter if rank_of(spec) == largest)
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
        if not name.endswith((*FIRST, *SECOND)):
            raise InputError(
                f"vLLM serves no module that is trained whole next to an adapter: {name}",
                hint=f"leave train.adapter.modules_to_save empty, {_HINT}",
            )
        if layer_of(name).rpartition(".")[2] == "kv_b_proj":
            raise InputError(
                f"vLLM multiplies kv_b_proj into other weights when it loads a model, and would "
                f"leave its adapter out of most steps: {name}",
                hint=f"leave kv_b_proj out of train.adapter.targets, {_HINT}",
            )
        tokens = vocabulary_of(spec)
        if tokens is not None and tokens > HEAD_LIMIT and name.endswith(SECOND):
            raise InputError(
                f"vLLM takes adapters of heads of at most {HEAD_LIMIT} tokens, not {tokens}: "
                f"{name}",
                hint=f"leave lm_head out of train.adapter.targets, {_HINT}",
            )


def above_rank(name: str, rank: int, limit: int) -> InputError:
    """Returns the error of an adapter whose rank is above the slot's."""
    return InputError(
        f"the adapter's rank {rank} is above the engine's, {limit}: {name}",
        hint=f"serve with a larger --max-lora-rank (at most {VLLM_RANKS[-1]}), or train less",
    )

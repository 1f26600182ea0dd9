"""Follows the adapter of a run in one of vLLM's adapter slots.

A slot is a range of the tensors that vLLM stacks adapters in, padded with zeros up to the engine's
largest rank. Where the elements of an adapter lie in it is observed, as for weights: vLLM's own
code fills the slot once with tensors without memory, which the placement traces. Versions are then
written over the old ones in place, and no file is read::

    run     base_model.model.….q_proj.lora_A.weight     observed at start
    vLLM    LoRAModel → activate_adapter → set_lora ──▶ qkv_proj.lora_a_stacked[0][slot]
    swap    changed elements of lora_A, and of lora_B times the adapter's scale

Slots of an embedding and of the head are whole on each tensor-parallel rank, over the vocabulary
without its padding, while their base weights are divided::

    embed_tokens     lora_a_stacked [slots, vocabulary, rank]   lora_embedding_A transposed
                     lora_b_stacked [slots, 1, hidden, rank]
    lm_head          lora_a_stacked [slots, 1, rank, hidden]    in the processor of the logits,
                     lora_b_stacked [slots, 1, vocabulary, rank]    which adds to gathered logits
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch import Tensor

from deltawire.engines.vllm.adapter_names import (
    FIRST,
    PREFIX,
    SECOND,
    above_rank,
    adapter_tensors,
    layer_of,
    rank_of,
    refuse_unservable,
    vocabulary_of,
)
from deltawire.errors import CorruptError, InputError
from deltawire.placement.placed import PlacedWeights
from deltawire.placement.placement import LoadWeights, Placement
from deltawire.store import Bucket
from deltawire.sync.chain.objects import get_blob
from deltawire.wire.payload import BlobRef
from deltawire.wire.run import Run, TensorSpec

ADAPTER_ID = (1 << 31) - 1
"""The number of the run's adapter in vLLM; those that clients load count up from 1."""

ADAPTER_NAME = "deltawire"
SETTINGS = "adapter_config.json"
MAX_SETTINGS_BYTES = 1 << 20


class AdapterSlot:
    """The slot of a run's adapter in ``model``, which vLLM has given adapter layers.

    Raises `InputError` for a model without slots, and for an adapter that vLLM cannot serve or
    would drop a part of.

    Example::

        slot = AdapterSlot(model, run.tensors, read_settings(bucket, run))
        placement = slot.scaled(probe(slot.loader(model.load_weights), run.tensors, slot.live()))
    """

    def __init__(self, model: Any, tensors: Iterable[TensorSpec], settings: dict[str, Any]) -> None:
        manager = getattr(model, "lora_manager", None)
        if manager is None:
            raise InputError(
                "the run holds an adapter, and this vLLM has no slot for one",
                hint="serve with --enable-lora and a --max-lora-rank that fits",
            )
        self._model, self._manager = model, manager
        self._tensors = adapter_tensors(tensors)
        refuse_unservable(tensors)
        self._layers = {spec.name: self._layer(spec) for spec in self._tensors}
        self._refuse_misfits()
        self.scales = _scales(self._tensors, settings)
        self._number = self._activate({})

    @property
    def has_head(self) -> bool:
        """True if the adapter has a part of the head."""
        return any(layer.rpartition(".")[2] == "lm_head" for layer in self._layers.values())

    def live(self) -> dict[str, Tensor]:
        """Returns the slot's tensors by name: the stacks of each layer, at this slot."""
        found = {}
        for name, module in self._manager.modules.items():
            for kind in ("lora_a_stacked", "lora_b_stacked"):
                for number, stack in enumerate(_stacks(module, kind)):
                    found[f"{name}.{kind}.{number}"] = stack[self._number]
        return found

    def loader(self, load_base: LoadWeights) -> LoadWeights:
        """Returns a loader of base and adapter, around the model's own loader of the base."""

        def load(weights: Iterable[tuple[str, Tensor]]) -> None:
            adapter: dict[str, Tensor] = {}

            def base() -> Iterator[tuple[str, Tensor]]:
                for name, tensor in weights:
                    if name.startswith(PREFIX):
                        adapter[name] = tensor
                    else:
                        yield name, tensor

            with _unwrapped(self._model):
                load_base(base())
            if adapter:
                self._number = self._activate(adapter)

        return load

    def scaled(self, placement: Placement) -> Placement:
        """Returns the placement with the adapter's scale in the regions of its second factors,
        which vLLM stores multiplied."""
        regions = [
            msgspec.structs.replace(
                region, scale=self.scales.get(placement.tensors[region.tensor].name, 1.0)
            )
            for region in placement.regions
        ]
        return msgspec.structs.replace(placement, regions=regions)

    def refuse_dropped(self, placements: list[Placement]) -> None:
        """Raises `InputError` if vLLM would leave out a tensor of the adapter on every rank."""
        for spec in self._tensors:
            for placement in placements:
                if why := placement.unplaced.get(spec.name):
                    raise InputError(f"vLLM computes with the adapter's {spec.name}: {why}")
            if not any(spec.name in placement.by_tensor for placement in placements):
                last = layer_of(spec.name).rpartition(".")[2]
                raise InputError(
                    f"vLLM has no adapter layer for {spec.name}, and would drop it",
                    hint=f"serve with --lora-target-modules {last}, or train without that layer",
                )

    @torch.no_grad()
    def clear(self) -> None:
        """Sets the slot to zeros, its padding included."""
        for module in self._manager.modules.values():
            module.reset_lora(self._number)

    def check_padding(self, placed: PlacedWeights) -> None:
        """Raises `CorruptError` unless the slot is zero wherever no element of the adapter lies."""
        for name, tensor in self.live().items():
            if int(tensor.count_nonzero()) != placed.count_nonzero(name):
                raise CorruptError(f"the padding of the adapter slot {name} is not zero")

    def _layer(self, spec: TensorSpec) -> str:
        """Returns vLLM's name of the layer of an adapter tensor."""
        from vllm.lora.utils import parse_fine_tuned_lora_name

        mapper = getattr(self._model, "hf_to_vllm_mapper", None)
        renames = None if mapper is None else mapper.get_rename_mapper()
        try:
            return str(parse_fine_tuned_lora_name(spec.name, renames)[0])
        except ValueError as error:
            raise InputError(f"vLLM does not know the adapter tensor {spec.name}") from error

    def _refuse_misfits(self) -> None:
        """Raises `InputError` for a rank or a vocabulary that is not the slot's, and for an
        embedding or a head of a model for which vLLM computes no adapter there."""
        limit = int(self._manager.lora_config.max_lora_rank)
        vocabulary = int(self._manager.vocab_size)
        for spec in self._tensors:
            if (rank := rank_of(spec)) > limit:
                raise above_rank(spec.name, rank, limit)
            if (tokens := vocabulary_of(spec)) is None:
                continue
            if tokens != vocabulary:
                raise InputError(
                    f"{spec.name} is for a vocabulary of {tokens} tokens, the engine's has "
                    f"{vocabulary}"
                )
            last = self._layers[spec.name].rpartition(".")[2]
            if last not in self._manager.supported_lora_modules:
                raise InputError(
                    f"vLLM computes no adapter of {last} in {type(self._model).__name__}: "
                    f"{spec.name}",
                    hint=f"train without {last}",
                )

    def _activate(self, tensors: dict[str, Tensor]) -> int:
        """Has vLLM put an adapter of these tensors, unscaled, into a slot; returns its number."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import LoRALayerWeights

        layers: dict[str, Any] = {}
        for name, tensor in tensors.items():
            held = layers.setdefault(
                self._layers[name],
                LoRALayerWeights(self._layers[name], 0, 1, None, None, scaling=1.0),
            )
            converted = tensor.to(dtype=self._manager.lora_config.lora_dtype)
            if name.endswith(FIRST):
                held.rank, held.lora_a = tensor.shape[0], converted
            else:
                held.lora_b = converted
        manager = self._manager
        manager.remove_adapter(ADAPTER_ID)
        adapter = LoRAModel(ADAPTER_ID, 1, layers)
        if layers:
            manager._create_merged_loras_inplace(adapter)
        manager._registered_adapters[ADAPTER_ID] = adapter
        try:
            manager.activate_adapter(ADAPTER_ID)
            manager.pin_adapter(ADAPTER_ID)
        finally:
            adapter.loras.clear()  # They may have no memory, and hold more than the slot needs.
        return int(manager.lora_index_to_id.index(ADAPTER_ID))


def adapter_request() -> Any:
    """Returns what tells vLLM that a request is served by the run's adapter."""
    from vllm.lora.request import LoRARequest

    # The path is not read: the adapter of that number is in its slot.
    return LoRARequest(ADAPTER_NAME, ADAPTER_ID, f"{ADAPTER_NAME}:")


def read_settings(bucket: Bucket, run: Run) -> dict[str, Any]:
    """Returns a run's ``adapter_config.json``; raises `InputError` if it has none."""
    file = next((one for one in run.model_files if one.name == SETTINGS), None)
    if file is None or file.bytes > MAX_SETTINGS_BYTES:
        raise InputError(
            f"the run holds an adapter without a readable {SETTINGS}, which states its scale",
            hint="start the run with deltawire run and train.adapter",
            run=bucket.url,
        )
    data = get_blob(bucket, BlobRef(hash=file.blob, bytes=file.bytes))
    try:
        settings = json.loads(bytes(data))
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{SETTINGS} is not JSON: {error}", run=bucket.url) from error
    if not isinstance(settings, dict):
        raise CorruptError(f"{SETTINGS} is not a JSON object", run=bucket.url)
    return settings


def _scales(tensors: Iterable[TensorSpec], settings: dict[str, Any]) -> dict[str, float]:
    """Returns the factor of each second factor, by its name, as vLLM computes it."""
    from vllm.lora.peft_helper import PEFTHelper

    try:
        peft = PEFTHelper.from_dict(settings)
        faults = peft._validate_features()
    except (TypeError, ValueError) as error:
        raise InputError(f"vLLM does not take the run's {SETTINGS}: {error}") from error
    if faults:
        raise InputError(f"vLLM does not serve this adapter: {' '.join(faults)}")
    found = {}
    for spec in tensors:
        rank, scale = peft.get_rank_and_scaling(layer_of(spec.name))
        if rank != (held := rank_of(spec)):
            raise InputError(f"{SETTINGS} states rank {rank} for {spec.name}, which has {held}")
        if spec.name.endswith(SECOND):
            found[spec.name] = float(scale)
    return found


def _stacks(module: Any, kind: str) -> Sequence[Tensor]:
    """Returns the tensors that a layer stacks adapters in, [slots, …] each: one for each part of a
    layer that vLLM joins of several, or a single one."""
    held = getattr(module, kind)
    return (held,) if isinstance(held, Tensor) else held


@contextmanager
def _unwrapped(model: torch.nn.Module) -> Iterator[None]:
    """Puts the layers that vLLM wrapped for adapters back where the model's loader expects them."""
    from vllm.lora.layers import BaseLayerWithLoRA

    wrapped = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if isinstance(child, BaseLayerWithLoRA)
    ]
    try:
        for parent, name, child in wrapped:
            parent._modules[name] = child.base_layer
        yield
    finally:
        for parent, name, child in wrapped:
            parent._modules[name] = child

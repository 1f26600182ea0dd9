"""Loads a transformers module in place, from tensors with its checkpoints' names and shapes.

Recent transformers versions stack experts and fuse other weights, while checkpoints, and so runs,
name them one by one. The library's own conversion rules lead from one to the other. Its loader
replaces parameters; this one copies into those that are being served.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from deltawire import codec
from deltawire.errors import InputError
from deltawire.placement.placement import LoadWeights
from deltawire.wire.run import TensorSpec


def live_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Returns the parameters and buffers of a module by name, tied ones under every name."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


@torch.no_grad()
def checkpoint_tensors(model: Any, state: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Returns the module's saved tensors under its checkpoints' names, tied ones once.

    ``state`` gives other values by the module's own names.
    """
    conversions = _library().conversions
    if state is None:
        own = {name for name, _ in model.named_parameters()}
        tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - own
        state = {name: t.detach() for name, t in model.state_dict().items() if name not in tied}
    found: dict[str, Tensor] = conversions.revert_weight_conversion(model, state)
    return found


def checkpoint_table(model: Any, dtype: str | None = None) -> list[TensorSpec]:
    """Returns the tensor table of `checkpoint_tensors`, in name order, as ``dtype`` if given."""
    return sorted(
        (
            TensorSpec(name, tuple(tensor.shape), dtype or codec.dtype_of(tensor))
            for name, tensor in checkpoint_tensors(model).items()
        ),
        key=lambda spec: spec.name,
    )


def module_loader(model: Any) -> LoadWeights:
    """Returns a loader that copies checkpoint tensors into the module's own memory.

    All tensors of a stack must be given in one call. The loader raises `InputError` for a tensor
    that the module does not have, and for one of another shape.
    """

    def load_weights(weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        live, loaded = live_tensors(model), set()
        with torch.no_grad():
            for name, tensor in _converted(model, weights):
                if name not in live:
                    raise InputError(f"the module has no tensor {name[:200]}")
                if live[name].shape != tensor.shape:
                    raise InputError(
                        f"tensor {name} is {tuple(tensor.shape)}, "
                        f"the module's is {tuple(live[name].shape)}"
                    )
                live[name].copy_(tensor)
                loaded.add(name)
        return loaded

    return load_weights


def _converted(model: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
    """Converts checkpoint tensors to the module's names and shapes."""
    library = _library()
    rules = library.mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, library.renaming)]
    converters = [rule for rule in rules if isinstance(rule, library.converter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    state = model.state_dict()
    collected: dict[str, Any] = {}
    for name, tensor in sorted(weights, key=lambda pair: library.order(pair[0])):
        target, pattern = library.rename(
            name, renamings, converters, model.base_model_prefix, state
        )
        if pattern is None:
            collected.setdefault(target, library.renaming(name, target))
        elif target not in collected:
            collected[target] = deepcopy(by_pattern[pattern])
        collected[target].add_tensor(target, name, pattern or name, tensor)
    for target, rule in collected.items():
        made = rule.convert(target, model=model, config=model.config)
        for name, value in made.items():
            yield name, value[0] if isinstance(value, list) else value


class _Library:
    """The parts of the library's conversion in use, none of which are its public interface."""

    def __init__(self) -> None:
        from transformers import conversion_mapping, core_model_loading

        self.conversions: Any = core_model_loading
        self.mapping: Any = conversion_mapping.get_model_conversion_mapping
        self.renaming: Any = core_model_loading.WeightRenaming
        self.converter: Any = core_model_loading.WeightConverter
        self.rename: Any = core_model_loading.rename_source_key
        self.order: Any = core_model_loading.dot_natural_key


def _library() -> _Library:
    try:
        return _Library()
    except (ImportError, AttributeError) as error:
        raise InputError(
            f"this version of transformers converts checkpoints in an unknown way: {error}",
            hint="install transformers 5.23, which is known to work",
        ) from error

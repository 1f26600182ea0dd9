"""Loads a transformers module in place, from tensors with its checkpoints' names and shapes."""

from copy import deepcopy

import torch
from transformers import conversion_mapping
from transformers import core_model_loading as loading

from deltawire import codec
from deltawire.errors import InputError
from deltawire.placement.checkpoint_tensors import checkpoint_tensors
from deltawire.wire.run import TensorSpec


def live_tensors(model):
    """Returns the parameters and buffers of a module by name, tied ones under every name."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def checkpoint_table(model, dtype=None):
    """Returns the tensor table of `checkpoint_tensors`, in name order, as ``dtype`` if given."""
    return sorted(
        (
            TensorSpec(name, tuple(tensor.shape), dtype or codec.dtype_of(tensor))
            for name, tensor in checkpoint_tensors(model).items()
        ),
        key=lambda spec: spec.name,
    )


def module_loader(model):
    """Returns a loader that copies checkpoint tensors into the module's own memory.

    All tensors of a stack must be given in one call. The loader raises `InputError` for a tensor
    that the module does not have, and for one of another shape.
    """

    def load_weights(weights):
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


def _converted(model, weights):
    """Converts checkpoint tensors to the module's names and shapes."""
    rules = conversion_mapping.get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    state = model.state_dict()
    collected = {}
    for name, tensor in sorted(weights, key=lambda pair: loading.dot_natural_key(pair[0])):
        target, pattern = loading.rename_source_key(
            name, renamings, converters, model.base_model_prefix, state
        )
        if pattern is None:
            collected.setdefault(target, loading.WeightRenaming(name, target))
        elif target not in collected:
            collected[target] = deepcopy(by_pattern[pattern])
        collected[target].add_tensor(target, name, pattern or name, tensor)
    for target, rule in collected.items():
        made = rule.convert(target, model=model, config=model.config)
        for name, value in made.items():
            yield name, value[0] if isinstance(value, list) else value

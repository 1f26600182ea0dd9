"""Checkpoint loaders in the style of serving engines, at any tensor- and expert-parallel size.

Each is a module with ``load_weights(iterator of names and tensors)`` and a table of the
checkpoint's tensors.
"""

import torch

from benchmarks.attest.sharded import Sharded

__all__ = ["Sharded", "bits_of", "live_of", "same_bits"]


def live_of(module):
    """Parameters and buffers by name, tied ones under every name."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers()),
    }


def bits_of(module):
    """Every live bit, by name."""
    carriers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return {
        name: tensor.detach().view(carriers[tensor.element_size()]).clone()
        for name, tensor in live_of(module).items()
    }


def same_bits(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)

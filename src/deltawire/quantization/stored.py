"""Names and types the parts of packed weights as checkpoints store them, and states the scheme.

======================  =========  =============================================================
layout                  formats    tensors of a weight ``NAME.weight``
======================  =========  =============================================================
``deepseek``            fp8-block  ``NAME.weight`` F8_E4M3, ``NAME.weight_scale_inv`` F32
``compressed-tensors``  fp8-block  ``NAME.weight`` F8_E4M3, ``NAME.weight_scale`` F32
..                      int8-row   ``NAME.weight`` I8, ``NAME.weight_scale`` BF16
..                      int4-g32   ``NAME.weight_packed`` I32, ``NAME.weight_scale`` BF16,
                                   ``NAME.weight_shape`` I64
..                      mxfp4      ``NAME.weight_packed`` U8, ``NAME.weight_scale`` U8
..                      nvfp4      as mxfp4 with F8_E4M3 scales, ``NAME.weight_global_scale`` F32
======================  =========  =============================================================

DeepSeek calls the factor ``scale_inv``, the inverse of what it divides by: weight = code · factor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from deltawire.config.exporters import StoredLayout
from deltawire.packed_formats import PACKED
from deltawire.quantization.formats import PackedFormat, Parts

_ACTIVATIONS: Final[dict[str, Any]] = {
    "num_bits": 8,
    "type": "float",
    "strategy": "group",
    "group_size": 128,
    "symmetric": True,
    "dynamic": True,
}


def stored_names(form: PackedFormat, layout: StoredLayout, name: str) -> dict[str, str]:
    """Returns the names under which a weight's ``codes`` and ``scales`` are stored. ``name`` ends
    in ``.weight``."""
    if form.bits == 8:
        suffix = "_scale_inv" if layout == "deepseek" else "_scale"
        return {"codes": name, "scales": f"{name}{suffix}"}
    return {"codes": f"{name}_packed", "scales": f"{name}_scale"}


def stored_tensors(
    form: PackedFormat, layout: StoredLayout, name: str, parts: Parts
) -> dict[str, Tensor]:
    """Returns a weight's tensors under the names and dtypes of the layout, as views of ``parts``
    where these are contiguous. ``name`` ends in ``.weight``."""
    codes, scales = parts["codes"].contiguous(), parts["scales"]
    names = stored_names(form, layout, name)
    found = {
        names["codes"]: codes.view(getattr(torch, PACKED[form.name].codes)),
        names["scales"]: scales,
    }
    if "shape" in PACKED[form.name].also_stored:
        found[f"{name}_shape"] = torch.tensor([codes.shape[0], 2 * codes.shape[1]])
    if "global_scale" in PACKED[form.name].also_stored:
        found[f"{name}_global_scale"] = parts["global_scale"][:1].clone()
    return found


def parts_of(
    form: PackedFormat, layout: StoredLayout, name: str, stored: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Returns the parts that `stored_tensors` gave, for formats of codes and scales."""
    names = stored_names(form, layout, name)
    return {"codes": stored[names["codes"]].view(torch.uint8), "scales": stored[names["scales"]]}


def quantization_config(
    form: PackedFormat, layout: StoredLayout, unquantized: Sequence[str]
) -> dict[str, Any]:
    """Returns the ``quantization_config`` of config.json; ``unquantized`` names the
    linear layers that are not quantized."""
    if layout == "deepseek":
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(form.block),
            "modules_to_not_convert": sorted(unquantized),
        }
    group: dict[str, Any] = {
        "targets": ["Linear"],
        "weights": {"symmetric": True, "dynamic": False, **PACKED[form.name].weights},
    }
    fp8 = form.name == "fp8-block"
    if fp8:
        group["input_activations"] = _ACTIVATIONS
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if fp8 else PACKED[form.name].layout,
        "quantization_status": "compressed",
        "ignore": sorted(unquantized),
        "config_groups": {"group_0": group},
    }

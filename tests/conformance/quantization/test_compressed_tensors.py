"""Packed formats against compressed-tensors, the library that defines their layouts in files."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from deltawire.quantization.dequantize import dequantize
from deltawire.quantization.formats import open_format

INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
FP8 = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
CASES = {
    "int4-g32": ("pack-quantized", INT4),
    "mxfp4": ("mxfp4-pack-quantized", MXFP4),
    "nvfp4": ("nvfp4-pack-quantized", NVFP4),
    "fp8-block": ("naive-quantized", FP8),
    "int8-row": ("naive-quantized", INT8),
}


def as_stored(name: str, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A layer's tensors as compressed-tensors stores them."""
    codes = parts["codes"]
    if name == "int4-g32":
        shape = torch.tensor([codes.shape[0], 2 * codes.shape[1]])
        return {
            "weight_packed": codes.view(torch.int32),
            "weight_scale": parts["scales"],
            "weight_shape": shape,
        }
    if name == "mxfp4":
        return {"weight_packed": codes, "weight_scale": parts["scales"]}
    if name == "nvfp4":
        return {
            "weight_packed": codes,
            "weight_scale": parts["scales"],
            "weight_global_scale": parts["global_scale"][:1],
        }
    dtype = torch.float8_e4m3fn if name == "fp8-block" else torch.int8
    return {"weight": codes.view(dtype), "weight_scale": parts["scales"]}


@pytest.fixture(params=sorted(CASES))
def case(request):
    name = request.param
    form = open_format(name)
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(0)) * 0.02
    stored_as, weights = CASES[name]
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    compressor = BaseCompressor.get_value_from_registry(stored_as)
    return form, weight, form.quantize(weight), scheme, compressor


def test_the_library_reads_what_is_packed_here(case):
    form, _, parts, scheme, compressor = case
    read = compressor.decompress(as_stored(form.name, parts), scheme)["weight"]
    ours = dequantize(form, parts)
    if form.name == "nvfp4":
        # The library divides scales in bf16; here the product is rounded once.
        assert torch.allclose(read.float(), ours.float(), rtol=2**-7, atol=0)
    else:
        assert torch.equal(read.to(torch.bfloat16), ours)


def test_the_library_makes_the_same_codes_with_the_same_scales(case):
    form, weight, parts, scheme, compressor = case
    stored = as_stored(form.name, parts)
    given = {"weight": weight, "weight_scale": form.float_scales(parts)}
    if "weight_global_scale" in stored:
        given["weight_scale"] = parts["scales"].float()
        given["weight_global_scale"] = stored["weight_global_scale"]
    made = compressor.compress(given, scheme)
    name = "weight_packed" if "weight_packed" in stored else "weight"
    found = made[name].view(torch.uint8) != stored[name].contiguous().view(torch.uint8)
    # Ties and divisions in another order may differ by one code.
    assert found.float().mean() < 1e-3

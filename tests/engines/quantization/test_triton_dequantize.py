"""The Triton kernels of packed weights, on Triton's interpreter or a GPU."""

from __future__ import annotations

import pytest
import torch

from deltawire.packed_formats import PACKED
from deltawire.quantization.dequantize import dequantize_with_torch
from deltawire.quantization.formats import open_format

pytest.importorskip("triton")


@pytest.mark.parametrize("shape", [(64, 96), (3, 130, 64), (2, 256, 384)])
@pytest.mark.parametrize("name", sorted(PACKED))
def test_the_kernel_writes_what_pytorch_computes(name, shape):
    from deltawire.quantization.triton_kernels import dequantize_blocks

    device = "cuda" if torch.cuda.is_available() else "cpu"
    form = open_format(name)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02
    parts = {part: one.to(device) for part, one in form.quantize(weight).items()}
    out = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    dequantize_blocks(form, parts["codes"], form.float_scales(parts).contiguous(), out)
    twin = dequantize_with_torch(form, parts)
    assert torch.equal(out.view(torch.int16), twin.view(torch.int16))

"""Which arrays have bits, and that those bits are not a copy."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from deltawire import codec
from deltawire.errors import InputError

NUMPY = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "U16": np.uint16,
    "I16": np.int16,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "U32": np.uint32,
    "I32": np.int32,
    "F32": np.float32,
    "U64": np.uint64,
    "I64": np.int64,
    "F64": np.float64,
}
TORCH = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
}


def test_tables_cover_every_wire_dtype():
    assert set(NUMPY) == set(TORCH) == set(codec.ITEMSIZE)


@pytest.mark.parametrize("dtype", NUMPY)
def test_numpy_bits_share_memory(dtype):
    array = np.zeros((3, 4), NUMPY[dtype])
    bits = codec.bits_of(array, dtype)
    assert codec.dtype_of(array) == dtype
    assert bits.shape == (12,)
    assert bits.dtype == np.dtype(f"u{codec.ITEMSIZE[dtype]}")
    bits[5] = 1
    assert array.view(bits.dtype)[1, 1] == 1


@pytest.mark.parametrize("dtype", TORCH)
def test_torch_bits_share_memory(dtype):
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(3, 4, dtype=getattr(torch, TORCH[dtype]))
    bits = codec.bits_of(tensor, dtype)
    assert codec.dtype_of(tensor) == dtype
    assert bits.shape == (12,)
    assert bits.dtype == np.dtype(f"u{codec.ITEMSIZE[dtype]}")
    bits[5] = 1
    assert tensor.reshape(-1)[5:6].view(torch.uint8).any()


def test_torch_parameters_and_scalars_have_bits():
    torch = pytest.importorskip("torch")
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    assert codec.bits_of(parameter).tolist() == [0x3F80, 0x3F80]
    assert codec.bits_of(torch.tensor(1.0)).tolist() == [0x3F800000]
    assert codec.bits_of(torch.empty(0, 3)).size == 0


def test_read_only_arrays_have_bits():
    array = np.arange(4, dtype=np.float32)
    array.flags.writeable = False
    assert codec.digest_bits("w", codec.bits_of(array)) != codec.ZERO


def test_bits_stand_for_the_dtype_of_their_width():
    assert codec.bits_of(np.zeros(3, np.uint16), "BF16").size == 3
    with pytest.raises(InputError, match="holds U32, not BF16"):
        codec.bits_of(np.zeros(3, np.uint32), "BF16")
    with pytest.raises(InputError, match="holds F16, not BF16"):
        codec.bits_of(np.zeros(3, np.float16), "BF16")
    with pytest.raises(InputError, match="not a wire dtype"):
        codec.bits_of(np.zeros(3, np.float16), "FP16")


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((4, 4))[:, 1],
        np.zeros((4, 4)).T[1:],
        np.frombuffer(bytes(17), np.float32, 4, 1),
        np.zeros(4, ">f4"),
        np.zeros(4, np.complex64),
        np.zeros(4, "M8[s]"),
        np.zeros(4, object),
        [1.0, 2.0],
        None,
    ],
)
def test_other_arrays_are_input_errors(array):
    with pytest.raises(InputError):
        codec.bits_of(array)


def test_other_tensors_are_input_errors():
    torch = pytest.importorskip("torch")
    for tensor in (
        torch.zeros(4, 4).T,
        torch.zeros(4, device="meta"),
        torch.zeros(4, dtype=torch.complex64),
        torch.eye(3).to_sparse(),
    ):
        with pytest.raises(InputError):
            codec.bits_of(tensor)


def test_the_codec_loads_neither_torch_nor_ml_dtypes():
    script = (
        "import sys, deltawire.codec; sys.exit(bool({'torch', 'ml_dtypes'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0

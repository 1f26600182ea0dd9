"""Packed formats of frozen weights: int4, int8, MXFP4, NVFP4 and fp8 blocks."""

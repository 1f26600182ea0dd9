"""Writes small Hugging Face directories whose weights are a function of their step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from deltawire.sync.huggingface.checkpoint_dir import INDEX

SHAPES: dict[str, tuple[tuple[int, ...], str]] = {
    "model.embed.weight": ((64, 48), "BF16"),
    "model.layers.0.bias": ((7,), "BOOL"),
    "model.layers.0.weight": ((48, 33), "BF16"),
    "model.norm.weight": ((33,), "F32"),
    "nothing": ((0, 3), "BF16"),
}
SIZES = {"BF16": 2, "BOOL": 1, "F32": 4}


def contents(step: int) -> dict[str, bytes]:
    """Every tensor's bytes at a step: a few more elements differ at each."""
    found = {}
    for number, (name, (shape, dtype)) in enumerate(SHAPES.items()):
        rng = np.random.default_rng(number)
        count = int(np.prod(shape)) * SIZES[dtype]
        data = bytearray(rng.integers(0, 2, count, np.uint8).tobytes())
        for at in range(step):
            for place in rng.integers(0, max(count, 1), 5):
                if count:
                    data[place] = (at + place) % 2
        found[name] = bytes(data)
    return found


def safetensors(tensors: dict[str, bytes], *, order: list[str], metadata: dict[str, str]) -> bytes:
    """Writes a file by hand, with an order, blanks and metadata that no library would choose."""
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name in order:
        shape, dtype = SHAPES[name]
        end = at + len(tensors[name])
        header[name] = {"shape": list(shape), "dtype": dtype, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode() + b"   "
    return len(text).to_bytes(8, "little") + text + b"".join(tensors[name] for name in order)


def write_directory(path: Path, step: int, *, sharded: bool = False, config: str = "{}") -> Path:
    path.mkdir(parents=True)
    tensors = contents(step)
    names = list(SHAPES)[::-1]
    if sharded:
        parts = {"model-00001-of-00002": names[:2], "model-00002-of-00002": names[2:]}
        for stem, order in parts.items():
            data = safetensors(tensors, order=order, metadata={"format": "pt"})
            (path / f"{stem}.safetensors").write_bytes(data)
        where = {n: f"{stem}.safetensors" for stem, order in parts.items() for n in order}
        (path / INDEX).write_text(json.dumps({"weight_map": where}))
    else:
        data = safetensors(tensors, order=names, metadata={"step": str(step)})
        (path / "model.safetensors").write_bytes(data)
    (path / "config.json").write_text(config)
    (path / "tokenizer.json").write_text('{"é": 1}')
    return path


def files_in(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}

"""Reads the expert choices that an engine returns with an answer.

Started with ``--enable-return-routed-experts``, engines add ``routed_experts`` to an answer:
choices of the shape [tokens of the prompt and the answer − 1, layers, experts chosen], since the
last token was not read. vLLM gives each choice of ``/inference/v1/generate`` base64 of a ``.npy``
file of unsigned integers, or null if it does not know them; SGLang gives ``meta_info`` of
``/generate`` base64 of int32 in little-endian order, for every layer, with zeros for dense ones.
"""

from __future__ import annotations

import base64
import binascii
import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltawire.errors import CorruptError, InputError

FLAG = "--enable-return-routed-experts"
MAX_LAYERS = 1024
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts")


def experts_of(config: Any) -> tuple[int, int]:
    """Returns how many experts a layer of the model has, and how many a token chooses; raises
    `InputError` for a model without experts."""
    text = config.get_text_config()
    count, chosen = (
        next((int(getattr(text, name)) for name in names if getattr(text, name, None)), 0)
        for names in (_COUNTS, _CHOSEN)
    )
    if not 1 <= chosen <= count:
        raise InputError(
            f"{type(config).__name__} names no experts whose choices an engine could tell",
            hint='set parity.routes = "off"',
        )
    return count, chosen


def read_routes(
    told: str | None,
    *,
    positions: int,
    experts: tuple[int, int],
    engine: str = "vLLM",
    is_file: bool = True,
) -> NDArray[np.int32]:
    """Returns the choices, int32[positions, layers, chosen].

    ``is_file`` says that they are a ``.npy`` file, not plain int32. Raises `InputError` if
    ``engine`` returned none, `CorruptError` unless they are choices for that many positions among
    ``experts``, all different for a token and layer.
    """
    if told is None:
        raise InputError(
            f"{engine} does not return its expert choices",
            hint=f'use a version of {engine} with {FLAG}, or set parity.routes = "off"',
        )
    count, chosen = experts
    try:
        data = base64.b64decode(told, validate=True)
        found: Any = (
            np.load(io.BytesIO(data), allow_pickle=False)
            if is_file
            else np.frombuffer(data, "<i4").reshape(positions, -1, chosen)
        )
    except (binascii.Error, ValueError, EOFError, OSError) as error:
        raise CorruptError(f"{engine}'s expert choices cannot be read: {error}") from error
    if (
        not isinstance(found, np.ndarray)
        or found.dtype.kind not in "ui"
        or found.ndim != 3
        or found.shape[0] != positions
        or not 1 <= found.shape[1] <= MAX_LAYERS
        or found.shape[2] != chosen
    ):
        shape = getattr(found, "shape", None)
        raise CorruptError(
            f"{engine}'s expert choices have the shape {shape}, not [{positions}, layers, {chosen}]"
        )
    routes = found.astype(np.int32)
    if routes.min() < 0 or routes.max() >= count:
        raise CorruptError(f"{engine} chose an expert outside the model's {count}")
    if (np.diff(np.sort(routes, axis=2), axis=2) == 0).any():
        raise CorruptError(f"{engine} chose an expert twice for one token")
    return routes


def route_bytes(positions: int, chosen: int) -> int:
    """Returns the most bytes that the choices of that many positions take in an answer."""
    return 1024 + 3 * positions * chosen * MAX_LAYERS

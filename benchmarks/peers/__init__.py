"""Delta formats of other systems, re-implemented from public sources for comparison.

deltawire does not use them outside benchmarks, and they do not validate untrusted input.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Final, NamedTuple

from benchmarks.peers.base import Format, Weights
from deltawire.errors import InputError

__all__ = ["PEERS", "Format", "Peer", "Weights", "missing", "open_peer"]


class Peer(NamedTuple):
    """The module of a format, and the packages that it needs in addition to deltawire's."""

    module: str
    name: str
    arguments: tuple[str, ...]
    needs: tuple[str, ...]


_FIREWORKS = ("fireworks_delta_compression", "torch")

PEERS: Final = {
    "arc-v2": Peer("fireworks", "Fireworks", ("arc_v2",), _FIREWORKS),
    "arc-v3": Peer("fireworks", "Fireworks", ("arc_v3",), _FIREWORKS),
    "sparse-int32": Peer("sparse", "SparseSafetensors", (), ()),
    "rowcol-zstd1": Peer("rowcol", "RowColumnZstd", (), ("zstandard",)),
    "xor-zstd1": Peer("xor", "XorZstd", (), ("zstandard",)),
    "gaps-xor-zstd1": Peer("gaps", "GapsXorZstd", (), ("zstandard",)),
    "full-zstd1": Peer("full", "FullZstd", (), ("zstandard",)),
    "raw": Peer("raw", "Raw", (), ()),
}
"""Every peer by its name in the table."""


def missing(name: str) -> list[str]:
    """The packages that peer ``name`` needs and that are not installed."""
    return [package for package in PEERS[name].needs if find_spec(package) is None]


def open_peer(name: str) -> Format:
    """The format of a peer. Raises InputError if the name is unknown, or a package is missing."""
    if name not in PEERS:
        raise InputError(f"there is no peer {name[:40]!r}", hint=f"known: {', '.join(PEERS)}")
    if absent := missing(name):
        raise InputError(
            f"{name} needs {' and '.join(absent)}", hint="pip install 'deltawire[bench]'"
        )
    peer = PEERS[name]
    make: Callable[..., Format] = getattr(
        import_module(f"benchmarks.peers.{peer.module}"), peer.name
    )
    return make(*peer.arguments)

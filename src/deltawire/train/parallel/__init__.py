"""Trainer ranks: their mesh, the sharded model, and sums over ranks.

A plain process is one rank of one: its parameters are sharded over a mesh of one, by the same code.
"""

from deltawire.train.parallel.mesh import TrainerMesh, is_sharded, open_mesh, whole_mesh
from deltawire.train.parallel.sharding import device_of, shard_model, to_device

__all__ = [
    "TrainerMesh",
    "device_of",
    "is_sharded",
    "open_mesh",
    "shard_model",
    "to_device",
    "whole_mesh",
]

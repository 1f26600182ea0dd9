"""Trainer ranks: their mesh, the sharded model, and sums over ranks.

A plain process is one rank of one: its parameters are sharded over a mesh of one, by the same code.
"""

from deltawire.train.parallel.mesh import TrainerMesh, open_mesh
from deltawire.train.parallel.sharding import shard_model

__all__ = ["TrainerMesh", "open_mesh", "shard_model"]

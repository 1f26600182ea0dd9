"""Opens the mesh of trainer ranks from what a launcher set in the environment.

Axes, outer to inner::

    replicate  ×  shard                ×  tensor
                  └ spare  ×  expert ┘

Ranks that differ only in ``tensor`` compute one micro-batch together; all others compute separate
micro-batches. Dense parameters are cut over ``tensor`` and sharded over ``shard``, and every
replica holds all of them. Expert parallelism adds no ranks: the ranks of ``shard`` that are next to
each other are an ``expert`` group, which divides the experts of a layer among its ranks; each part
is sharded over ``spare``, the groups of one replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from deltawire.config import TrainConfig
from deltawire.errors import InputError
from deltawire.train.parallel.ranks import broadcast, join_ranks, open_single_rank, world_of


@dataclass(frozen=True)
class TrainerMesh:
    """This process among the trainer's ranks.

    ``data`` has the axes ``shard``, or ``replicate`` and ``shard``; it is None for a single process
    that computes in float32, whose weights are not sharded. ``tensor`` is None without tensor
    parallelism, ``expert`` without expert parallelism. ``expert_data`` is the mesh that a rank's
    experts are sharded over: ``data``, or with expert parallelism ``spare`` in place of ``shard``.
    ``data_rank`` of ``data_ranks`` computes a share of each step's groups.

    Example::

        mesh = open_mesh(config.train, torch.device("cpu"))
        if mesh.rank == 0:
            print(mesh.ranks, mesh.data_ranks, mesh.device)
    """

    rank: int
    ranks: int
    device: torch.device
    data: DeviceMesh | None
    tensor: DeviceMesh | None
    data_rank: int
    data_ranks: int
    expert: DeviceMesh | None = None
    expert_data: DeviceMesh | None = None

    @property
    def divides_experts(self) -> DeviceMesh | None:
        """The axes over which the experts of a layer are divided: ``expert`` and ``tensor``, where
        they exist."""
        axes = [one for one in (self.expert, self.tensor) if one is not None]
        return _joined(*axes) if axes else None

    @property
    def leads(self) -> bool:
        """Returns whether this is rank 0, which decides and commits."""
        return self.rank == 0

    def sum(self, values: Sequence[float] | Tensor) -> Tensor:
        """Returns the sum over all ranks of float64[N], which every rank gets to the same bits."""
        total = torch.as_tensor(values, dtype=torch.float64).cpu().clone()
        if self.ranks > 1:
            dist.all_reduce(total)
        return total

    def sum_data(self, values: Sequence[float] | Tensor) -> Tensor:
        """Returns the sum over ranks that compute different micro-batches, as `sum` does."""
        counted = self.tensor is None or self.tensor.get_local_rank() == 0
        own = torch.as_tensor(values, dtype=torch.float64)
        return self.sum(own if counted else torch.zeros_like(own))

    def gather_data(self, data: bytes) -> list[bytes]:
        """Returns the bytes of each rank that computes different micro-batches."""
        width = 1 if self.tensor is None else self.tensor.size()
        return self.gather(data)[::width]

    def gather(self, data: bytes) -> list[bytes]:
        """Returns each rank's bytes, in order of ranks."""
        if self.ranks == 1:
            return [data]
        sizes = self.sum([len(data) if rank == self.rank else 0 for rank in range(self.ranks)])
        longest = max(1, int(sizes.max()))
        own = torch.zeros(longest, dtype=torch.uint8)
        own[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[
            : len(data)
        ]
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.ranks)]
        dist.all_gather(parts, own)
        return [
            part[: int(size)].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)
        ]

    def broadcast(self, data: bytes = b"") -> bytes:
        """Returns rank 0's bytes."""
        return broadcast(data)


def whole_mesh(device: torch.device) -> TrainerMesh:
    """Returns the mesh of a process that holds the whole model, whatever other ranks there are."""
    return TrainerMesh(0, 1, device, None, None, 0, 1)


def is_sharded(config: TrainConfig, ranks: int) -> bool:
    """Returns whether `open_mesh` gives this many ranks a mesh with axes."""
    return ranks > 1 or config.compute != "float32"


def open_mesh(config: TrainConfig, device: torch.device, *, sharded: bool = False) -> TrainerMesh:
    """Joins this process to the trainer's other ranks; without a launcher it is the only one.

    A single process that computes in float32 gets a mesh without axes, unless ``sharded``: sums
    over one rank need no process group, and gathering weights from itself costs up to a third of a
    small model's step and changes no bit. Waits for all ranks. Raises `InputError` if the axes do
    not divide the number of ranks that was started, which may be another than ``train.ranks``.
    """
    rank, ranks = world_of()
    if found := config.layout_contradiction(ranks):
        raise InputError(f"train: {found[0]}", hint=found[1])
    if not (is_sharded(config, ranks) or sharded):
        return whole_mesh(device)
    _join(ranks, device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    sizes = {
        "replicate": config.replicate,
        "spare": ranks // (config.replicate * config.tensor_parallel * config.expert_parallel),
        "expert": config.expert_parallel,
        "tensor": config.tensor_parallel,
    }
    divided = config.expert_parallel > 1
    # Without expert parallelism, ``spare`` is all of ``shard``.
    kept = {
        "shard" if name == "spare" and not divided else name: size
        for name, size in sizes.items()
        if size > 1 or name == "spare"
    }
    whole = init_device_mesh(device.type, tuple(kept.values()), mesh_dim_names=tuple(kept))
    shard = whole["spare", "expert"]._flatten("shard") if divided else whole["shard"]
    copies = [whole["replicate"]] if config.replicate > 1 else []
    return TrainerMesh(
        rank=rank,
        ranks=ranks,
        device=device,
        data=_joined(*copies, shard),
        tensor=whole["tensor"] if config.tensor_parallel > 1 else None,
        data_rank=rank // config.tensor_parallel,
        data_ranks=ranks // config.tensor_parallel,
        expert=whole["expert"] if divided else None,
        expert_data=_joined(*copies, whole["spare"] if divided else shard),
    )


def _joined(*axes: DeviceMesh) -> DeviceMesh:
    return DeviceMesh._concatenate(list(axes)) if len(axes) > 1 else axes[0]


def _join(ranks: int, device: torch.device) -> None:
    """Opens the default process group once; sums of figures always travel through the CPU."""
    if ranks == 1:
        open_single_rank(device)
    else:
        join_ranks()
    if dist.get_world_size() != ranks:
        raise InputError(
            f"torch.distributed is open with {dist.get_world_size()} ranks, not {ranks}",
            hint="let deltawire open it, or start as many ranks",
        )

"""Reads what a rank holds of torch tensors: whole ones, and its parts of distributed ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from deltawire import codec
from deltawire.attest.combining import HeldPart, Ranks, described
from deltawire.attest.parts import Index, digest_part, first_of_range
from deltawire.attest.statement import TensorDigest
from deltawire.codec import Digest
from deltawire.errors import InputError
from deltawire.export.shards import is_first_holder, local_part
from deltawire.export.tensors import (
    base_name,
    check_separable,
    dtype_named,
    is_sharded,
    tensors_of,
    unwrapped,
)
from deltawire.placement.checkpoint_tensors import checkpoint_tensors
from deltawire.placement.layout import WIRE_DTYPES
from deltawire.placement.live import saved_buffers
from deltawire.sync.publish.sources import table_of
from deltawire.wire.run import TensorSpec

CHUNK_ELEMENTS = 1 << 22
"""Elements that are copied to the host at a time."""
ROUNDED_ELEMENTS = 1 << 15
"""Elements of the host that are rounded at a time: they stay in the processor's cache, and torch
rounds so few in the calling thread."""
SAMPLED_ELEMENTS = 64
"""Elements of a matrix that tell whether it may be tied to an earlier one."""
TASK_ELEMENTS = 1 << 20
"""Elements that one thread digests before it takes the next ones."""

Task = Callable[[], Digest]


@torch.no_grad()
def held_parts(
    model: Any, *, dtype: str | None, merged: bool
) -> tuple[list[HeldPart], dict[str, str]]:
    """Returns the digests of what this rank holds of a module or a mapping, and the aliases.

    Raises `InputError` as `digests` does.
    """
    wanted = dtype_named(dtype)
    kept: set[str] = set()
    if hasattr(model, "named_parameters"):
        named, aliases, kept = _of_module(model, dtype, merged=merged)
    else:
        named, aliases = _untied(model)
    held = [
        _held(name, tensor, wanted if tensor.is_floating_point() and name not in kept else None)
        for name, tensor in named.items()
    ]
    with _threads() as threads:
        running = [one.started(threads) for one in held]
        return [one.part() for one in running], aliases


@torch.no_grad()
def stream_digests(
    stream: Iterable[tuple[str, Tensor]], dtype: str | None
) -> tuple[list[TensorDigest], dict[str, str]]:
    """Digests whole tensors as they pass; none is kept. Returns them and the aliases: matrices with
    the bits of an earlier one, as exports give a tied tensor under each of its names, and often
    gathered once more. Raises `InputError` as `digests` does."""
    wanted = dtype_named(dtype)
    found: list[TensorDigest] = []
    aliases: dict[str, str] = {}
    first: dict[tuple[object, ...], HeldPart] = {}
    with _threads() as threads:
        for name, tensor in stream:
            rounded = wanted if tensor.is_floating_point() else None
            held = _held(name, tensor, rounded)
            sample = _sample(tensor, rounded or tensor.dtype)
            twin = first.get(sample) if sample else None
            if twin is not None:
                same = _held(twin.spec.name, tensor, rounded).started(threads).part()
                if same.digest == twin.digest:
                    aliases[name] = twin.spec.name
                    continue
            part = held.started(threads).part()
            if sample:
                first.setdefault(sample, part)
            found.append(described(part.spec, part.digest))
    return found, aliases


def _sample(tensor: Tensor, dtype: torch.dtype) -> tuple[object, ...]:
    """Returns a few elements of a matrix, its shape and dtype: matrices with other ones differ.
    Empty if they are all zero, and for vectors: those of a new model are alike and not tied."""
    if tensor.ndim < 2 or isinstance(tensor, DTensor) or not tensor.numel():
        return ()
    middle = tensor[tuple(size // 2 for size in tensor.shape[:-1])]
    bits = _bits(middle[:SAMPLED_ELEMENTS], dtype)
    return (tuple(tensor.shape), dtype, bits.tobytes()) if bits.any() else ()


def _threads() -> ThreadPoolExecutor:
    """Returns as many threads as torch uses. Rounding and digesting release the interpreter."""
    return ThreadPoolExecutor(max(1, torch.get_num_threads()), "deltawire-digest")


@dataclass(frozen=True)
class _DigestedTensor:
    """The part of a tensor on this rank, with the ``tasks`` that digest it; see `HeldPart`."""

    spec: TensorSpec
    tasks: Sequence[Task]
    elements: int
    counts: bool | None = None
    on_host: bool = True

    def started(self, threads: ThreadPoolExecutor) -> _DigestedTensor:
        """Returns the same with tasks that run. The calling thread reads a GPU's memory itself:
        other threads have other current streams, which do not wait for earlier writes."""
        if not self.on_host:
            return replace(self, tasks=[partial(_same, task()) for task in self.tasks])
        return replace(self, tasks=[threads.submit(task).result for task in self.tasks])

    def part(self) -> HeldPart:
        """Returns the digest, once its tasks have ended."""
        total = sum((task() for task in self.tasks), codec.ZERO)
        return HeldPart(self.spec, total, self.elements, self.counts)


def _same(found: Digest) -> Digest:
    return found


def _of_module(
    model: Any, dtype: str | None, *, merged: bool
) -> tuple[dict[str, Tensor], dict[str, str], set[str]]:
    """Returns the tensors of a module's checkpoint by name, its aliases, and the names of buffers,
    which are never rounded."""
    model = unwrapped(model)
    wrapped = hasattr(model, "get_base_model")
    base = model.get_base_model() if wrapped else model
    aliases = _ties(base)
    kept = set(saved_buffers(base))
    if wrapped and merged:
        if is_sharded(model):
            raise InputError(
                "merging an adapter into sharded weights would gather them",
                hint="leave merged out: base and adapter are digested separately",
            )
        return tensors_of(model, dtype), aliases, kept
    adapter: dict[str, Tensor] = {}
    if wrapped:
        import peft

        adapter = peft.get_peft_model_state_dict(
            model, adapter_name=check_separable(model), save_embedding_layers=False
        )
    state = {}
    for name, tensor in base.state_dict().items():
        plain = base_name(base, name) if wrapped else name
        if plain is not None and plain not in aliases:
            state[plain] = tensor.detach()
    # Without transformers it is none of its models, and importing takes seconds. A model that was
    # loaded without conversions has an empty list of them.
    if "transformers" in sys.modules and getattr(base, "_weight_conversions", None) != []:
        state = checkpoint_tensors(base, state)
    return state | adapter, aliases, kept


def _ties(base: Any) -> dict[str, str]:
    """Returns the further names of tied parameters, each with the name that is kept."""
    first = {id(parameter): name for name, parameter in base.named_parameters()}
    return {
        name: first[id(parameter)]
        for name, parameter in base.named_parameters(remove_duplicate=False)
        if first[id(parameter)] != name
    }


def _untied(tensors: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Splits a mapping into tensors and aliases of them."""
    whole = {name: one for name, one in tensors.items() if not isinstance(one, DTensor)}
    odd = [name for name, one in whole.items() if not isinstance(one, Tensor)]
    if odd:
        raise InputError(f"{odd[0][:80]!r} is no tensor", hint="give arrays, or torch's tensors")
    _, aliases = table_of(whole)
    return {name: one for name, one in tensors.items() if name not in aliases}, aliases


def _held(name: str, tensor: Tensor, rounded: torch.dtype | None) -> _DigestedTensor:
    dtype = rounded or tensor.dtype
    if dtype not in WIRE_DTYPES or tensor.layout != torch.strided:
        raise InputError(
            f"{name} has the dtype {tensor.dtype} or a layout that no checkpoint holds",
            hint="a packed weight can be digested as its codes and scales",
        )
    if tensor.device.type == "meta":
        raise InputError(f"{name} is on the meta device: it has no bits")
    spec = TensorSpec(name, tuple(tensor.shape), WIRE_DTYPES[dtype])
    if not isinstance(tensor, DTensor):
        local = local_part(tensor)
        tasks = _tasks(spec, None, local, dtype)
        return _DigestedTensor(spec, tasks, spec.count, on_host=local.device.type == "cpu")
    if tensor.device_mesh.get_coordinate() is None:
        return _DigestedTensor(spec, (), 0, counts=False)
    if any(one.is_partial() for one in tensor.placements):
        raise InputError(f"{name} holds partial sums", hint="reduce it before it is digested")
    indexes, local = indexes_of(tensor), local_part(tensor)
    held = tuple(len(index) for index in indexes)
    if held != tuple(local.shape):
        raise InputError(f"{name} holds {tuple(local.shape)} where {held} is expected")
    tasks = _tasks(spec, indexes, local, dtype)
    on_host = local.device.type == "cpu"
    return _DigestedTensor(spec, tasks, local.numel(), is_first_holder(tensor), on_host)


def indexes_of(tensor: DTensor) -> list[Index]:
    """Returns the indexes of the elements that this rank holds, for each dimension: those that it
    gets if the indexes themselves are divided in the same way. Needs no communication."""
    found = []
    for axis, size in enumerate(tensor.shape):
        placed = [
            _on_one_axis(one) if one.is_shard(axis) or _strided(one, axis) else Replicate()
            for one in tensor.placements
        ]
        index = torch.arange(size)
        divided = distribute_tensor(index, tensor.device_mesh, placed, src_data_rank=None)
        found.append(divided.to_local().cpu().numpy())
    return found


def _strided(placement: Any, axis: int) -> bool:
    return type(placement).__name__ == "_StridedShard" and placement.dim == axis


def _on_one_axis(placement: Any) -> Any:
    """Returns a placement that divides dimension 0 as the given one divides its own."""
    if hasattr(placement, "split_factor"):
        return type(placement)(0, split_factor=placement.split_factor)
    return type(placement)(0)


def _tasks(
    spec: TensorSpec, indexes: list[Index] | None, local: Tensor, dtype: torch.dtype
) -> Sequence[Task]:
    """Returns what digests the part of a tensor at ``indexes``, all of it if they are None, for
    several threads at once if its elements lie one after the other in the tensor and in the host's
    memory."""
    local = local.detach()  # Other threads would record gradients.
    start = 0 if indexes is None else first_of_range(spec.shape, indexes)
    if start is None or local.device.type != "cpu" or not local.is_contiguous():
        indexes = [np.arange(size) for size in spec.shape] if indexes is None else indexes
        return [partial(digest_tensor, spec, indexes, local, dtype)]
    flat = local.view(-1)
    return [
        partial(_digest_range, spec.name, flat[at : at + TASK_ELEMENTS], start + at, dtype)
        for at in range(0, flat.numel(), TASK_ELEMENTS)
    ]


def _digest_range(name: str, flat: Tensor, start: int, dtype: torch.dtype) -> Digest:
    """Digests elements from ``start`` on, rounded to ``dtype``: float32 to bfloat16 in one pass if
    all are numbers, else in a buffer."""
    if flat.dtype == dtype:
        return codec.digest_bits(name, _bits(flat, dtype), start)
    if (flat.dtype, dtype) == (torch.float32, torch.bfloat16):
        found = codec.digest_rounded(name, flat.numpy(), start)
        if found is not None:
            return found
    buffer = torch.empty(min(ROUNDED_ELEMENTS, flat.numel()), dtype=dtype)
    bits, total = _bits(buffer, dtype), codec.ZERO
    for at in range(0, flat.numel(), ROUNDED_ELEMENTS):
        part = flat[at : at + ROUNDED_ELEMENTS]
        buffer[: part.numel()].copy_(part)
        total += codec.digest_bits(name, bits[: part.numel()], start + at)
    return total


def digest_tensor(
    spec: TensorSpec, indexes: list[Index], local: Tensor, dtype: torch.dtype
) -> Digest:
    """Digests the part of a tensor at ``indexes``, rounded to ``dtype``, some rows at a time."""
    if not local.numel():
        return codec.ZERO
    if not indexes:
        return digest_part(spec.name, spec.shape, [], _bits(local, dtype))
    rows = max(1, CHUNK_ELEMENTS * len(local) // local.numel())
    total = codec.ZERO
    for first in range(0, len(local), rows):
        bits = _bits(local[first : first + rows], dtype)
        part = [indexes[0][first : first + rows], *indexes[1:]]
        total += digest_part(spec.name, spec.shape, part, bits)
    return total


def _bits(values: Tensor, dtype: torch.dtype) -> codec.Bits:
    return codec.bits_of(values.to("cpu", dtype).contiguous(), WIRE_DTYPES[dtype])


class TorchRanks:
    """The ranks of a process group of torch."""

    def __init__(self, group: Any = None) -> None:
        self.number = dist.get_rank(group)
        self.count = dist.get_world_size(group)
        self._group = group
        on_gpu = "nccl" in str(dist.get_backend(group))
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else "cpu"

    def gather(self, data: bytes) -> list[bytes]:
        """Returns the bytes of every rank."""
        sizes = self._gather(torch.tensor([len(data)]))
        longest = max(int(size) for size in sizes)
        own = torch.zeros(longest, dtype=torch.uint8)
        own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        every = self._gather(own)
        return [
            part.numpy().tobytes()[: int(size)] for part, size in zip(every, sizes, strict=True)
        ]

    def _gather(self, own: Tensor) -> list[Tensor]:
        own = own.to(self._device)
        every = [torch.empty_like(own) for _ in range(self.count)]
        dist.all_gather(every, own, group=self._group)
        return [part.cpu() for part in every]

    def add_up(self, words: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the sum over the ranks; torch's integers wrap around."""
        sums = torch.from_numpy(words.copy()).to(self._device)
        dist.all_reduce(sums, group=self._group)
        found: NDArray[np.int64] = sums.cpu().numpy()
        return found


def torch_ranks(group: Any) -> Ranks | None:
    """Returns the ranks of a group, of all processes if it is None; None for a process without."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    return TorchRanks(group)

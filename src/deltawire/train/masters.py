"""Keeps fp32 master weights, sharded over ranks, for a model that computes with published weights.

Small steps add up in the masters until they move a published bit; forward passes see the bits that
are published, so trainer and sampler compute with the same weights. On a mesh, the model's own
parameters are the masters, and are rounded where a layer gathers them
(`deltawire.train.parallel.sharding`). A single process that computes in float32 has nothing to
gather: its masters are copies, and its parameters hold the rounded values. Both give the same bits
(`tests/unit/train/test_sharded_steps.py`).
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

import msgspec
import torch
from blake3 import blake3
from torch import Tensor
from torch.distributed.tensor import DTensor

from deltawire import codec
from deltawire.codec import Digest
from deltawire.config import TrainConfig
from deltawire.errors import BugError, CorruptError, InputError
from deltawire.export.cast import CastWeights, published_part
from deltawire.export.shards import LocalShard, box_of, local_part, rows_of_rank, unwrapped_shard
from deltawire.export.source import WeightSource, bits_of, open_source
from deltawire.placement.live import published_names, saved_buffers
from deltawire.sync.follow.mirror import Mirror
from deltawire.train.checkpoint_storage import bytes_of
from deltawire.train.dither import dither
from deltawire.train.optimizer import Optimizer, StepSettings, open_optimizer
from deltawire.train.parallel import TrainerMesh, device_of, open_mesh, shard_model
from deltawire.train.parallel.clipping import clip_gradients
from deltawire.train.served_share import ServedShare, ServedShares

COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class MasterWeights:
    """An optimizer on float32 masters of a model's parameters, which a mesh shards in place.

    ``source`` is what is published of the model; by default ``config.exporter`` decides. ``mesh``
    is this process among the trainer's ranks; by default the one that a launcher set up, or a
    single process. ``seed`` is the run's, which dithered masters (`deltawire.train.dither`) are a
    function of. Frozen parameters have no master; those that the sharded model ``frozen`` holds too
    share its memory. Saved buffers take no optimizer steps: they are published, and kept with the
    state, as the model sets them.
    """

    def __init__(
        self,
        model: Any,
        config: TrainConfig,
        *,
        source: WeightSource | None = None,
        mesh: TrainerMesh | None = None,
        frozen: Any = None,
        seed: int = 0,
    ) -> None:
        self.model = model
        self.mesh = mesh or open_mesh(config, device_of(model))
        published = (source or open_source(config.exporter, model)).compute_dtype
        if self.mesh.data is not None:
            compute = COMPUTE_DTYPES[config.compute]
            shard_model(model, self.mesh, compute=compute, published=published, frozen=frozen)
        self.source = source or open_source(config.exporter, model)
        if self.mesh.ranks > 1 and not hasattr(self.source, "shards"):
            raise InputError(
                f"the exporter {config.exporter} cannot publish from {self.mesh.ranks} ranks",
                hint="give it the method shards, or set train.ranks = 1",
            )
        self.steps = 0
        self.served: ServedShares | None = None
        self._config, self.seed = config, seed
        self._masters = {
            name: _master(parameter)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        self._optimizer = self._open_optimizer()
        self._round()

    def _open_optimizer(self) -> Optimizer:
        return open_optimizer(
            self._masters, self._config, not_matrices=vocabulary_parameters(self.model)
        )

    @torch.no_grad()
    def step(self, settings: StepSettings | None = None) -> float:
        """Takes a step on the model's gradients and clears them; returns their norm before
        clipping.

        If the norm is not finite, only the count of steps changes. ``settings`` replace the
        configuration's for this step. All ranks call this together.
        """
        parameters = {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if name in self._masters
        }
        limit = (settings or self._config.optimizer).max_grad_norm or math.inf
        norm = clip_gradients(parameters.values(), limit, self.mesh)
        self.steps += 1
        if math.isfinite(norm):
            gradients = {name: parameter.grad for name, parameter in parameters.items()}
            self._optimizer.step(gradients, self.steps, settings=settings)
            self._round(self._masters)
        for parameter in parameters.values():
            parameter.grad = None
        return norm

    def shards(self) -> Mapping[str, LocalShard]:
        """This rank's part of what is published now; the parts of all ranks are the model."""
        if self.mesh.ranks == 1:
            return {name: LocalShard(one, 0) for name, one in self.source.tensors().items()}
        source: Any = self.source
        found: Mapping[str, LocalShard] = source.shards(self.mesh.rank)
        return found

    def trained(self) -> dict[str, Tensor]:
        """This rank's part of what a step may have changed of what is published."""
        if self.mesh.ranks == 1:
            return dict(self.source.trained())
        source: Any = self.source
        shards: Mapping[str, LocalShard] = source.shards(self.mesh.rank, trained=True)
        return {name: shard.bits for name, shard in shards.items()}

    def digest(self) -> Digest:
        """Returns the digest that a version published now would have, from all ranks."""
        if self.mesh.ranks == 1:
            return codec.digest_model(bits_of(self.source))
        dtypes = {spec.name: spec.dtype for spec in self.source.specs()}
        own = codec.ZERO
        for name, shard in self.shards().items():
            own += codec.digest_bits(name, codec.bits_of(shard.bits, dtypes[name]), shard.start)
        total = codec.ZERO
        for part in self.mesh.gather(own.hex().encode()):
            total += Digest.from_hex(part.decode())
        return total

    def digests(self, names: Container[str]) -> dict[str, Digest]:
        """Returns the digests of some published tensors now, by name, from all ranks."""
        dtypes = {spec.name: spec.dtype for spec in self.source.specs()}
        own = {
            name: codec.digest_bits(
                name, codec.bits_of(shard.bits, dtypes[name]).reshape(-1), shard.start
            ).hex()
            for name, shard in self.shards().items()
            if name in names
        }
        total: dict[str, Digest] = {}
        for part in self.mesh.gather(msgspec.json.encode(own)):
            for name, digest in msgspec.json.decode(part, type=dict[str, str]).items():
                total[name] = total.get(name, codec.ZERO) + Digest.from_hex(digest)
        return total

    @torch.no_grad()
    def reset(self, mirror: Mirror) -> None:
        """Sets the masters to a published version, dithered if so configured, and the optimizer to
        its start.

        ``mirror`` holds at least what `wanted_of` names. Raises as `WeightSource.restore` does.
        """
        self.source.restore(mirror)
        for name, parameter in self.model.named_parameters():
            if name in self._masters and not isinstance(parameter, DTensor):
                self._masters[name].copy_(parameter)
        self.dither()
        # An adapter of merged weights starts in float32: no version holds its published values.
        self._round(self._masters)
        self.remember(since=mirror.version)
        self.restart_optimizer()

    @torch.no_grad()
    def dither(self) -> None:
        """Places masters that hold published values at random in their rounding intervals, if the
        configuration says so. The published bits do not change."""
        for name, master in self._masters.items():
            self._dither(name, local_part(master))

    def _dither(self, name: str, local: Tensor) -> None:
        """Dithers this rank's part of a master."""
        if self._config.masters != "dithered":
            return
        master = self._masters[name]
        shape, offset = tuple(local.shape), (0,) * local.ndim
        if isinstance(master, DTensor):
            shape, offset = box_of(master)
        if tuple(local.shape) != shape:
            raise BugError(f"{name} holds {tuple(local.shape)} where {shape} is expected")
        dither(
            local,
            self.source.compute_dtype,
            seed=self.seed,
            name=published_names(self.model)[name],
            shape=tuple(master.shape),
            offset=offset,
        )

    def remember(self, *, since: int) -> None:
        """Measures the served share from the present masters on, which are those of a version."""
        held = ((name, local_part(master)) for name, master in self._masters.items())
        self.served = self._shares(held, since)

    @torch.no_grad()
    def remember_start(self, mirror: Mirror) -> None:
        """Measures the served share from the masters on that a published version begins with.

        ``mirror`` holds at least this rank's part of trained tensors (`trained_rows`).
        """
        specs = {spec.name: spec for spec in self.source.specs()}
        names = published_names(self.model)

        def starts() -> Iterator[tuple[str, Tensor]]:
            for name, master in self._masters.items():
                values = published_part(master, specs[names[name]], mirror).float()
                self._dither(name, values)
                yield name, values

        self.served = self._shares(starts(), mirror.version)

    def trained_rows(self) -> dict[str, tuple[int, int] | None]:
        """Returns the rows of published tensors that this rank's masters lie in; None for all."""
        names = published_names(self.model)
        rows = {names[name]: rows_of_rank(master) for name, master in self._masters.items()}
        return {name: one for name, one in rows.items() if one is None or one[0] < one[1]}

    def _shares(self, starts: Iterable[tuple[str, Tensor]], since: int) -> ServedShares | None:
        """None for published values that are not the masters rounded to 16 bits."""
        dtype = self.source.compute_dtype
        if not isinstance(self.source, CastWeights) or dtype.itemsize != 2:
            return None
        return ServedShares(self._masters, starts, dtype, since=since)

    def served_share(self) -> ServedShare | None:
        """Returns the part of the training that is published now; None if that is not known, or
        nothing was trained. All ranks call this together."""
        return None if self.served is None else self.served.measure(self._masters, self.mesh)

    def restart_optimizer(self) -> None:
        """Sets the optimizer to its start; the masters keep their values."""
        del self._optimizer  # There is no room for the states of two.
        self._optimizer = self._open_optimizer()
        self.steps = 0

    @property
    def has_frozen(self) -> bool:
        """Returns whether some parameters are not trained, so that `state` does not hold them."""
        return any(not parameter.requires_grad for parameter in self.model.parameters())

    def frozen_names(self) -> set[str]:
        """Returns the names of published tensors that no step changes."""
        if not self.has_frozen or self.mesh.ranks > 1:
            return set()
        return {spec.name for spec in self.source.specs()} - self.source.trained().keys()

    @torch.no_grad()
    def load_frozen(self, mirror: Mirror) -> None:
        """Sets frozen parameters to those of a published version; masters keep their values."""
        kept = {name: local_part(master).clone() for name, master in self._masters.items()}
        self.source.restore(mirror)
        for name, master in self._masters.items():
            local_part(master).copy_(kept[name])
        self._round()

    def state(self) -> dict[str, Tensor]:
        """Everything that a later process needs to continue exactly.

        Tensors that are sharded are DTensors; the others are the same on all ranks.
        """
        state = {"steps": torch.tensor(self.steps)}
        for name, master in self._masters.items():
            state[f"master/{name}"] = unwrapped_shard(master)
        state |= self._optimizer.state()
        for name, buffer in saved_buffers(self.model).items():
            state[f"buffer/{name}"] = buffer
        return state

    def state_hash(self) -> str:
        """Returns the BLAKE3 of the `state`: for each tensor, in the order of names, its name,
        dtype and shape as a line of JSON, and its bytes. Empty on several ranks, whose steps one
        process does not compute again to the same bits, and for sharded tensors.
        """
        state = self.state()
        if self.mesh.ranks > 1 or any(isinstance(one, DTensor) for one in state.values()):
            return ""
        total = blake3(max_threads=torch.get_num_threads())
        for name, tensor in sorted(state.items()):
            dtype = str(tensor.dtype).removeprefix("torch.")
            total.update(msgspec.json.encode([name, dtype, list(tensor.shape)]) + b"\n")
            total.update(bytes_of(tensor.cpu()).data)
        return total.hexdigest()

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restores a `state`; raises `CorruptError` if it does not fit this model."""
        for name, master in self._masters.items():
            saved = state.get(f"master/{name}")
            if saved is None or saved.shape != master.shape:
                raise CorruptError(f"the checkpoint does not fit the model at {name}")
            local_part(master).copy_(local_part(saved))
        self._optimizer.restore(state)
        for name, buffer in saved_buffers(self.model).items():
            saved = state.get(f"buffer/{name}")
            if saved is None or (saved.shape, saved.dtype) != (buffer.shape, buffer.dtype):
                raise CorruptError(f"the checkpoint does not fit the model at {name}")
            buffer.copy_(saved)
        if "steps" not in state:
            raise CorruptError("the checkpoint has no count of steps")
        self.steps = int(state["steps"])
        self._round()

    @torch.no_grad()
    def _round(self, names: Container[str] | None = None) -> None:
        """Sets parameters that are not the masters themselves to the published values: all, or
        those of ``names``. Packed weights are published as they are."""
        for name, parameter in self.model.named_parameters():
            if isinstance(parameter, DTensor) or not parameter.is_floating_point():
                continue
            if names is None or name in names:
                values = self._masters.get(name, parameter)
                parameter.copy_(values.to(self.source.compute_dtype))


def _master(parameter: Tensor) -> Tensor:
    """Returns a sharded parameter is its own master. Do not keep its local part: FSDP2 moves a part
    that it pads to new memory when the model computes for the first time.
    """
    return parameter if isinstance(parameter, DTensor) else parameter.detach().float().clone()


def vocabulary_parameters(model: Any) -> set[str]:
    """Names of the embeddings' and the head's parameters, whose rows are vectors of tokens."""
    found: set[int] = set()
    for get in ("get_input_embeddings", "get_output_embeddings"):
        module = getattr(model, get)() if hasattr(model, get) else None
        found |= (
            {id(parameter) for parameter in module.parameters()} if module is not None else set()
        )
    return {name for name, parameter in model.named_parameters() if id(parameter) in found}

"""One rank's side of a training client: model, optimizer, publisher and checkpoints of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from deltawire.config import RunConfig
from deltawire.config.exporters import scheme_of
from deltawire.config.machine import machine_policy
from deltawire.errors import CorruptError, InputError
from deltawire.export.adapter import open_model
from deltawire.export.models import check_directory, fetch_model_files, load_tokenizer
from deltawire.export.new_run import load_start, publish_start
from deltawire.export.source import wanted_of
from deltawire.placement.device import resolve_device
from deltawire.runtime.trusted import open_trusted
from deltawire.store import Bucket
from deltawire.sync import (
    Mirror,
    Publisher,
    ShardPublisher,
    find_run,
    load_mirror,
    newest_version,
    read_manifest,
    read_run,
)
from deltawire.train.checkpoint import CheckpointWriter, load_checkpoint
from deltawire.train.checkpoint_folders import keep_checkpoint
from deltawire.train.client.forward import evaluate
from deltawire.train.client.operations import (
    Begin,
    Done,
    EndTrainer,
    Evaluate,
    Evaluation,
    Operation,
    PublishWeights,
    Restore,
    Result,
    Saved,
    SaveState,
    StayAlive,
    Stepped,
    TakeStep,
)
from deltawire.train.client.types import AdamParams
from deltawire.train.frozen_base import check_frozen_base
from deltawire.train.masters import MasterWeights
from deltawire.train.optimizer import StepSettings
from deltawire.train.parallel.ranks import local_rank
from deltawire.train.policy import TrainedPolicy
from deltawire.train.publishing import open_rank_publisher
from deltawire.wire.ledger import CLIENT_RECORD, Ledger
from deltawire.wire.run import Run
from deltawire.wire.seal import Signer

LostState = Literal["refuse", "reset", "repeat"]
"""The policy when versions were published after the newest optimizer state."""


def new_run(
    bucket: Bucket,
    model: Path,
    config: RunConfig,
    *,
    signer: Signer | None = None,
    run_id: str = "",
) -> None:
    """Starts a run with the model of a directory as version 0; with ``signer``, a signed one with
    the id ``run_id``.

    A run whose first process died before version 0 is completed. Raises `InputError` if the bucket
    holds a run already, or the model cannot be loaded.
    """
    if find_run(bucket) is not None and newest_version(bucket) is not None:
        raise InputError(
            "a run exists here already",
            hint="continue it with TrainingClient.load, or choose another folder",
            run=bucket.url,
        )
    check_directory(model)
    load_tokenizer(model)
    if scheme_of(config.train.exporter) is not None:
        raise InputError(
            f"a training client cannot continue from what train.exporter {config.train.exporter} "
            "publishes",
            hint='set train.exporter = "bf16"',
            run=bucket.url,
        )
    if config.train.also_publish:
        raise InputError(
            "a training client publishes in one precision",
            hint="leave out train.also_publish",
            run=bucket.url,
        )
    start = load_start(config, model)
    publish_start(bucket, config, model, start, signer=signer, run_id=run_id)


class TrainingSession:
    """One rank's state between two operations of a training client.

    All ranks open a session together, and carry out every operation together, in the same order.
    """

    def __init__(
        self,
        bucket: Bucket,
        run: Run,
        config: RunConfig,
        masters: MasterWeights,
        publisher: Publisher | ShardPublisher,
        state: _LoadedState,
        *,
        confirm: Callable[[], None],
    ) -> None:
        self.bucket = bucket
        self.run = run
        self.masters = masters
        self.model = masters.model
        self._publisher = publisher
        self._ledger = state.ledger
        self._confirm = confirm
        self.policy = TrainedPolicy.of(self.model, config.train)
        self.budget = config.train.max_tokens_per_batch
        """Tokens of one forward pass; a longer sequence gets a separate pass."""
        self._checkpoints = CheckpointWriter(bucket, masters.mesh, run=run.id, confirm=confirm)
        self._held = state.version
        """The version that the weights are, unless they changed."""
        self._saved = self._held if state.saved else -1
        self._changed = False
        self.notice = state.notice
        """A remark for the user on the state; empty if there is none."""
        self.state_record = _client_record(bucket, run, self._held)
        """The caller's record, stored with the version that the state was loaded from."""
        ahead = range(self._held + 1, publisher.version + 1)
        self._ahead = {version: _client_record(bucket, run, version) for version in ahead}

    @classmethod
    def open(
        cls,
        bucket: Bucket,
        run: Run,
        config: RunConfig,
        begin: Begin,
        *,
        lost_state: LostState,
        signer: Signer | None = None,
        confirm: Callable[[], None] = lambda: None,
    ) -> TrainingSession:
        """Opens the version that rank 0 begins from; see `deltawire.train.TrainingClient.load`."""
        torch.set_num_threads(config.threads)
        with fetch_model_files(bucket, run) as name:
            model = open_model(Path(name), config.train.adapter, seed=config.seed)
        model = model.to(resolve_device(config.device_of("trainer"), index=local_rank()))
        model.train(config.train.dropout)
        masters = MasterWeights(model, config.train, seed=config.seed)
        head = _reset(bucket, run, masters, at=_base_version(masters, begin.version))
        check_frozen_base(bucket, run, masters)
        state = _load_state(bucket, run, masters, begin.version, lost_state)
        publisher = open_rank_publisher(
            bucket,
            run,
            masters.mesh,
            masters.shards,
            version=begin.version,
            epoch=begin.epoch,
            session=begin.session,
            anchor_every=config.train.anchor_every,
            signer=signer,
            head=head if masters.mesh.ranks == 1 and head.version == begin.version else None,
            snapshot_dir=machine_policy().publisher_dir(config.train.publisher_offload),
        )
        return cls(bucket, run, config, masters, publisher, state, confirm=confirm)

    def carry_out(self, operation: Operation) -> Result:
        """Carries out an operation, with all ranks; rank 0's result counts."""
        match operation:
            case Evaluate():
                return self._evaluate(operation)
            case TakeStep():
                return Stepped(metrics=self._step(operation.params))
            case PublishWeights():
                return self._as_saved(self._publish(operation.name, operation.record))
            case SaveState():
                version = self._publish(operation.name, operation.record)
                self._save(keep=operation.keep)
                return self._as_saved(version)
            case Restore():
                self._restore(operation.path, optimizer=operation.optimizer)
                return self._as_saved(self.version)
            case StayAlive() | EndTrainer():
                return Done()

    def _as_saved(self, version: int) -> Saved:
        return Saved(version=version, newest=self.version)

    def _evaluate(self, operation: Evaluate) -> Evaluation:
        gradients = self.gradients() if operation.backward else contextlib.nullcontext()
        with gradients:
            return evaluate(self.policy, self.masters.mesh, operation, budget=self.budget)

    @property
    def version(self) -> int:
        """The newest version that was published."""
        return self._publisher.version

    @contextlib.contextmanager
    def gradients(self) -> Iterator[None]:
        """Adds the gradients of the body to earlier ones; if it raises, only the earlier ones
        remain."""
        parameters = [one for one in self.model.parameters() if one.requires_grad]
        before = [one.grad for one in parameters]
        for one in parameters:
            one.grad = None
        try:
            yield
        except BaseException:
            for one, old in zip(parameters, before, strict=True):
                one.grad = old
            raise
        for one, old in zip(parameters, before, strict=True):
            if one.grad is None:
                one.grad = old
            elif old is not None:
                one.grad = old.add_(one.grad)

    def _step(self, params: AdamParams) -> dict[str, float]:
        before = self.masters.steps
        norm = self.masters.step(
            StepSettings(
                learning_rate=params.learning_rate,
                beta1=params.beta1,
                beta2=params.beta2,
                epsilon=params.eps,
                weight_decay=params.weight_decay,
                max_grad_norm=params.grad_clip_norm,
            )
        )
        self._changed = True
        finite = bool(torch.isfinite(torch.tensor(norm)))
        return {
            "grad_norm:mean": norm,
            "learning_rate:mean": params.learning_rate,
            "skipped:sum": float(not finite),
            "step:max": float(before + 1),
        }

    def _publish(self, name: str, record: Mapping[str, Any]) -> int:
        """Publishes the weights, unless they are published already; returns their version.

        ``record`` is stored with the version. A version after the state that was loaded is found
        again by its name, step and record, if the weights have its digest.
        """
        if not self._changed:
            return self._held
        self._confirm()
        stored = {"step": self.masters.steps} | ({"name": name[:200]} if name else {}) | {**record}
        version = self._found_again(stored)
        if version is None:
            version = self._publisher.publish(
                self.masters.trained(), partial=True, metadata={CLIENT_RECORD: stored}
            )
            self._publisher.flush()
        self._held, self._changed = version, False
        return version

    def _found_again(self, record: Mapping[str, Any]) -> int | None:
        for version, known in self._ahead.items():
            if version > self._held and known == record:
                manifest = read_manifest(self.bucket, self.run, version)
                if manifest is not None and manifest.digest == self.masters.digest().hex():
                    return version
        return None

    def _save(self, *, keep: bool) -> None:
        """Stores the state for the version that the weights are. ``keep`` keeps it until it is
        released (`deltawire.train.checkpoint_folders`); of the others the last two are kept."""
        self._confirm()
        if keep and self.masters.mesh.leads:
            keep_checkpoint(self.bucket, self._held)
        if self._saved == self._held:
            return
        self._checkpoints.save(
            self.masters.state(),
            self._ledger,
            version=self._held,
            digest=self.masters.digest().hex(),
        )
        self._checkpoints.release_memory()
        self._saved = self._held

    def _restore(self, where: str, *, optimizer: bool) -> None:
        """Restores the state of ``RUN_URL@VERSION``; without ``optimizer``, its weights only."""
        url, _, number = where.rpartition("@")
        if not url or not number.isdecimal() or len(number) > 10:
            raise InputError(f"{where[:200]!r} is not RUN_URL@VERSION")
        bucket = self.bucket if url == self.bucket.url else open_trusted(url)
        version = int(number)
        run = read_run(bucket)
        if run.tensors != self.run.tensors:
            raise InputError("the state belongs to another model", run=url, version=version)
        state = {name: one.clone() for name, one in self.masters.state().items()}
        found = load_checkpoint(bucket, state, newest=version, mesh=self.masters.mesh)
        if found is None or found.version != version:
            raise InputError(
                f"there is no state of version {version}",
                hint="the last two are kept; save with save_state(keep=True)",
                run=url,
            )
        self.masters.restore(state)
        if not optimizer:
            self.masters.restart_optimizer()
        for parameter in self.model.parameters():
            parameter.grad = None
        self._changed = True

    def close(self) -> None:
        """Ends the threads; a version under way is finished."""
        try:
            self._publisher.close()
        finally:
            self._checkpoints.close()


class _LoadedState(NamedTuple):
    """Where a session begins: the version that the weights are, and whether its state is stored."""

    version: int
    saved: bool
    ledger: Ledger
    notice: str


def _base_version(masters: MasterWeights, version: int) -> int:
    """Returns the version that a model is read from: version 0 of a run whose later versions do not
    hold the frozen base."""
    found: int = getattr(masters.source, "base_version", version)
    return found


def _reset(bucket: Bucket, run: Run, masters: MasterWeights, *, at: int) -> Mirror:
    """Sets the weights to a version, and the optimizer to its start; returns what was loaded: the
    whole version on a single process, else this rank's part."""
    wanted = None if masters.mesh.ranks == 1 else wanted_of(masters.source)
    found = load_mirror(bucket, run, at=at, wanted=wanted)
    masters.reset(found)
    return found


def _load_state(
    bucket: Bucket, run: Run, masters: MasterWeights, newest: int, lost_state: LostState
) -> _LoadedState:
    """Restores the newest state; without one of the version ``newest``, ``lost_state`` decides.

    ``masters`` hold the weights of that version, or the base that it was trained from.
    """
    mesh, state = masters.mesh, masters.state()
    found = load_checkpoint(bucket, state, newest=newest, mesh=mesh, run=run.id)
    ledger = found.ledger if found else Ledger()
    if found is not None and found.version == newest:
        masters.restore(state)
        manifest = read_manifest(bucket, run, newest)
        if manifest is None or masters.digest().hex() != manifest.digest:
            raise CorruptError(
                "the newest checkpoint holds other weights than its version", run=bucket.url
            )
        return _LoadedState(newest, True, ledger, _other_ranks(found.ranks, mesh.ranks))
    if newest == 0 or lost_state == "reset":
        _reset(bucket, run, masters, at=newest)  # An older state may have been read over it.
        return _LoadedState(newest, False, ledger, "")
    if lost_state == "refuse":
        at = f"that of version {found.version}" if found else "missing"
        raise InputError(
            f"the newest version is {newest}, and the newest optimizer state is {at}",
            hint="stop a trainer with one Ctrl-C so that it saves its state; or load with "
            'lost_state="repeat", which goes back to that state, or "reset", which starts a new '
            "optimizer state on the newest weights",
            run=bucket.url,
        )
    if found is None:
        _reset(bucket, run, masters, at=0)
        return _LoadedState(0, False, ledger, "")
    masters.restore(state)
    return _LoadedState(found.version, True, ledger, _other_ranks(found.ranks, mesh.ranks))


def _other_ranks(before: int, now: int) -> str:
    """Describes a change in the number of ranks since the state was saved; empty without one."""
    if before == now:
        return ""
    return (
        f"the state was saved by {_counted(before)}, and this trainer has {_counted(now)}: sums "
        "have another order, so later results may differ from those in their last bits"
    )


def _counted(ranks: int) -> str:
    return f"{ranks} ranks" if ranks > 1 else "1 rank"


def _client_record(bucket: Bucket, run: Run, version: int) -> dict[str, Any]:
    """Returns the record that a client stored with a version; empty if no client published it."""
    manifest = read_manifest(bucket, run, version)
    found = manifest.metadata.get(CLIENT_RECORD) if manifest else None
    return found if isinstance(found, dict) else {}

"""The trainer's side of a training client: model, optimizer, publisher and checkpoints of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from deltawire.config import ModelConfig, RunConfig, TrainConfig, run_config
from deltawire.errors import CorruptError, InputError
from deltawire.export.adapter import open_model
from deltawire.export.models import check_directory, fetch_model_files, load_tokenizer
from deltawire.export.new_run import load_start, publish_start
from deltawire.export.source import open_source
from deltawire.runtime.fleet import next_epoch
from deltawire.runtime.lease import Lease
from deltawire.runtime.trusted import open_trusted
from deltawire.store import Bucket
from deltawire.sync import (
    Publisher,
    load_mirror,
    newest_version,
    read_manifest,
    read_run,
    require_run,
)
from deltawire.train.checkpoint import keep_checkpoint, load_checkpoint, save_checkpoint
from deltawire.train.client.types import AdamParams
from deltawire.train.masters import MasterWeights
from deltawire.train.optimizer import StepSettings
from deltawire.train.policy import TrainedPolicy
from deltawire.wire.ledger import CLIENT_RECORD, Ledger
from deltawire.wire.run import Run
from deltawire.wire.seal import Signer

LostState = Literal["refuse", "reset", "repeat"]
"""The policy when versions were published after the newest optimizer state."""


def new_run(
    bucket: Bucket,
    model: Path,
    config: RunConfig | None,
    *,
    name: str,
    signer: Signer | None = None,
    run_id: str = "",
) -> None:
    """Starts a run with the model of a directory as version 0; with ``signer``, a signed one with
    the id ``run_id``.

    A run whose first process died before version 0 is completed. Raises `InputError` if the bucket
    holds a run already, or the model cannot be loaded.
    """
    if read_run(bucket) is not None and newest_version(bucket) is not None:
        raise InputError(
            "a run exists here already",
            hint="continue it with TrainingClient.load, or choose another folder",
            run=bucket.url,
        )
    check_directory(model)
    load_tokenizer(model)
    config = config or RunConfig(name=name, model=ModelConfig(path=str(model)))
    start = load_start(config, model)
    publish_start(bucket, config, model, start, signer=signer, run_id=run_id)


class TrainingSession:
    """The state between two operations of a training client, on this process's devices."""

    def __init__(
        self,
        bucket: Bucket,
        run: Run,
        model: Any,
        tokenizer: Any,
        masters: MasterWeights,
        publisher: Publisher,
        ledger: Ledger,
        lease: Lease,
        config: TrainConfig,
        *,
        state_of: int | None,
        saved: bool,
    ) -> None:
        self.bucket = bucket
        self.run = run
        self.model = model
        self.tokenizer = tokenizer
        self.masters = masters
        self._publisher = publisher
        self._ledger = ledger
        self._lease = lease
        self.policy = TrainedPolicy.of(model, config)
        self.budget = config.max_tokens_per_batch
        """Tokens of one forward pass; a longer sequence gets its own pass."""
        self._held = publisher.version if state_of is None else state_of
        """The version that the weights are, unless they changed."""
        self._saved = self._held if saved else -1
        self._changed = False
        self.state_record = _client_record(bucket, run, self._held)
        """The caller's record, stored with the version that the state was loaded from."""
        ahead = range(self._held + 1, publisher.version + 1)
        self._ahead = {version: _client_record(bucket, run, version) for version in ahead}

    @classmethod
    def open(
        cls, bucket: Bucket, lease: Lease, *, lost_state: LostState, signer: Signer | None = None
    ) -> TrainingSession:
        """Opens a run's newest version; see `deltawire.train.TrainingClient.load`."""
        run = require_run(bucket)
        config = run_config(run.config, url=bucket.url)
        torch.set_num_threads(config.threads)
        head = load_mirror(bucket, run)
        if head is None:
            raise InputError("the run has no version 0", run=bucket.url)
        with fetch_model_files(bucket, run) as name:
            model = open_model(Path(name), config.train.adapter, seed=config.seed)
            tokenizer = load_tokenizer(Path(name))
        source = open_source(config.train.exporter, model)
        source.restore(head)
        model.train(config.train.dropout)
        masters = MasterWeights(model, config.train, source=source)
        state = masters.state()
        found = load_checkpoint(bucket, state, newest=head.version, run=run.id)
        ledger = found.ledger if found else Ledger()
        saved = found is not None and found.version == head.version
        state_of: int | None = None
        if saved:
            masters.restore(state)
            if masters.digest() != head.digest:
                raise CorruptError(
                    "the newest checkpoint holds other weights than its version", run=bucket.url
                )
        elif head.version > 0 and lost_state == "repeat":
            saved, state_of = found is not None, found.version if found else 0
            if found is None:
                masters.reset(load_mirror(bucket, run, at=0) or head)
            else:
                masters.restore(state)
        elif head.version > 0 and lost_state == "refuse":
            at = f"that of version {found.version}" if found else "missing"
            raise InputError(
                f"the newest version is {head.version}, and the newest optimizer state is {at}",
                hint="stop a trainer with one Ctrl-C so that it saves its state; or load with "
                'lost_state="reset", which starts a new optimizer state on the newest weights',
                run=bucket.url,
            )
        if not saved and state_of is None:
            masters.reset(head)  # An older state was read over it.
        publisher = Publisher(
            bucket,
            run,
            head,
            epoch=next_epoch(bucket, run, head.version),
            anchor_every=config.train.anchor_every,
            compaction_strides=(),
            signer=signer,
        )
        return cls(
            bucket,
            run,
            model,
            tokenizer,
            masters,
            publisher,
            ledger,
            lease,
            config.train,
            state_of=state_of,
            saved=saved,
        )

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

    def step(self, params: AdamParams) -> dict[str, float]:
        """Takes one optimizer step; returns its metrics."""
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

    def publish(self, name: str, record: Mapping[str, Any] | None = None) -> int:
        """Publishes the weights, unless they are published already; returns their version.

        ``record`` is stored with the version. A version after the state that was loaded is found
        again by its name, step and record, if the weights have its digest.
        """
        if not self._changed:
            return self._held
        self._lease.confirm()
        stored = {"step": self.masters.steps} | ({"name": name[:200]} if name else {})
        stored |= record or {}
        version = self._found_again(stored)
        if version is None:
            version = self._publisher.publish(
                self.masters.source.tensors(), metadata={CLIENT_RECORD: stored}
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

    def save(self, *, keep: bool = False) -> None:
        """Stores the state for the version that the weights are. ``keep`` keeps it until
        `deltawire.train.checkpoint.release_checkpoint`; of the others the last two are kept."""
        if self._changed:
            return
        self._lease.confirm()
        if keep:
            keep_checkpoint(self.bucket, self._held)
        if self._saved == self._held:
            return
        save_checkpoint(
            self.bucket,
            self.masters.state(),
            self._ledger,
            version=self._held,
            digest=self.masters.digest().hex(),
            run=self.run.id,
        )
        self._saved = self._held

    def restore(self, where: str, *, optimizer: bool = True) -> None:
        """Restores the state of ``RUN_URL@VERSION``; without ``optimizer``, its weights only."""
        url, _, number = where.rpartition("@")
        if not url or not number.isdecimal() or len(number) > 10:
            raise InputError(f"{where[:200]!r} is not RUN_URL@VERSION")
        bucket = self.bucket if url == self.bucket.url else open_trusted(url)
        version = int(number)
        run = require_run(bucket)
        if run.tensors != self.run.tensors:
            raise InputError("the state belongs to another model", run=url, version=version)
        state = {name: one.clone() for name, one in self.masters.state().items()}
        found = load_checkpoint(bucket, state, newest=version)
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
        """Waits for the version under way."""
        self._publisher.close()


def _client_record(bucket: Bucket, run: Run, version: int) -> dict[str, Any]:
    """Returns the record that a client stored with a version; empty if no client published it."""
    manifest = read_manifest(bucket, run, version)
    found = manifest.metadata.get(CLIENT_RECORD) if manifest else None
    return found if isinstance(found, dict) else {}

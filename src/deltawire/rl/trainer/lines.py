"""Trains several adapters of one run over one base, step by step in turn.

::

    main thread    line a: a step, if it has groups ─▶ line b ─▶ … ─▶ line a …

Each line is trained by a `deltawire.rl.trainer.trainer.Trainer` with its own bucket, so groups,
staleness, ledger, checkpoints and retention are those of the line. The models share the parameters
of the base (`deltawire.export.lines`; over ranks, `deltawire.train.line_masters`). A step seeds its
random numbers by its line and version, so a line's bits do not depend on the order of turns. Other
ranks take the orders of all lines in the order in which rank 0 sends them (`LineRanks`)::

    rank 0    StartLines ─▶ Start a ─▶ Start b ─▶ Train a ─▶ Publish a ─▶ Train b ─▶ … ─▶ End a, b
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from types import TracebackType

import msgspec

from deltawire.config import RunConfig
from deltawire.config.lines import line_config
from deltawire.errors import InputError
from deltawire.rl.trainer.model import open_policy_model
from deltawire.rl.trainer.orders import Orders, StartLines
from deltawire.rl.trainer.rank import translated
from deltawire.rl.trainer.trainer import Trainer
from deltawire.runtime.fleet import next_epoch
from deltawire.runtime.lines import line_bucket
from deltawire.runtime.process import Process, open_run
from deltawire.sync import read_run
from deltawire.wire import keys
from deltawire.wire.objects import encode_json
from deltawire.wire.seal import Signer
from deltawire.wire.status import Phase, TrainerStatus


class LinesTrainer:
    """Leads a trainer for each line of a run. A context manager, which ends their threads.

    ``signer`` signs the versions of a signed run's lines. ``changed`` says that ``config`` was
    given at this start, and not read from the run.

    Example::

        with LinesTrainer(process, config) as trainer:
            trainer.loop()
    """

    def __init__(
        self,
        process: Process,
        config: RunConfig,
        *,
        signer: Signer | None = None,
        changed: bool = False,
    ) -> None:
        self._process, self._config, self._signer = process, config, signer
        self._run = read_run(process.bucket)
        self._epoch = next_epoch(process.bucket, self._run, 0)
        self._changed = changed
        self._open = ExitStack()
        self._orders = Orders()
        self.trainers: dict[str, Trainer] = {}
        """The trainers by the names of their lines."""

    def __enter__(self) -> LinesTrainer:
        try:
            self._orders.send(StartLines(run=self._run.id, public_key=self._run.public_key))
            self._orders.arrived()
            for one in self._config.train.adapters:
                with self._process.heartbeat.long_task("start"):
                    self.trainers[one.name] = self._open_line(one.name)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.close()

    def _open_line(self, name: str) -> Trainer:
        place = line_bucket(self._process.bucket, name)
        process = self._process.in_line(place)
        self._open.enter_context(process.registered())
        run, config = open_run(process.bucket, role="trainer")
        if config.line is None or config.line.base != self._run.digest:
            raise InputError(
                f"line {name} is not one of this run's base",
                hint="start a new run with these adapters",
                run=place.url,
            )
        if self._changed:
            config = line_config(self._config, name, base=self._run.digest)
        process.heartbeat.faults = config.faults
        process.record_life("started")
        model = open_policy_model(process.bucket, run, config)
        trainer = Trainer(process, run, config, model, signer=self._signer, orders=self._orders)
        self._open.callback(trainer.close)
        return trainer

    def loop(self) -> None:
        """Train until every line has its last version, or until asked to stop."""
        waiting = dict(self.trainers)
        for trainer in waiting.values():
            trainer.begin()
        self._write("training")
        while waiting:
            self._process.heartbeat.progress("wait")
            worked = False
            for name, trainer in list(waiting.items()):
                place = trainer.bucket, trainer.run, trainer.epoch
                with self._process.heartbeat.long_task("train"), translated(*place):
                    if trainer.is_training:
                        worked |= trainer.turn()
                        continue
                    trainer.finish()
                del waiting[name]
                trainer.process.record_life("stopped", f"version {trainer.version}")
            if waiting and not worked:
                self._process.wait(self._process.bucket.poll_s / 4)
        self._write("stopped" if self._process.stopping else "finished")

    @property
    def described(self) -> str:
        """Return the version of each line."""
        return ", ".join(f"{name} {one.version}" for name, one in self.trainers.items())

    def _write(self, phase: Phase) -> None:
        """Write the run's own status: its version is the base's, and stays 0."""
        status = TrainerStatus(
            phase=phase,
            version=0,
            digest=self._run.digest,
            epoch=self._epoch,
            credits={},
            at=0.0,
        )
        self._process.lease.confirm()
        stamped = msgspec.structs.replace(status, at=time.time())
        self._process.bucket.put(keys.TRAINER, encode_json(stamped))

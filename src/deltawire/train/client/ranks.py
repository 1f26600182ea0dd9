"""Rank 0 of a training client carries out operations with all ranks; the others follow it.

Concurrency::

    rank 0                                            rank k
      Begin ──────────────────────────────────────▶     open the session
      run(operation): the operation ──────────────▶     carry it out
          carry it out, agree ◀───────────────────▶     agree that it was refused, or was not
      StayAlive, every 30 idle seconds ───────────▶     wait on
      EndTrainer ─────────────────────────────────▶     close

All ranks refuse an operation for the same reason, before they compute; it then had no effect. Any
other error ends the trainer: ranks that fail in the middle of an operation are not in step. A
single process is rank 0 of one rank. It sends nothing, and every error is the operation's only.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from deltawire.config import RunConfig
from deltawire.errors import BugError, InputError
from deltawire.runtime.fleet import next_epoch
from deltawire.runtime.process import Process, open_run
from deltawire.runtime.trusted import ANY, ReaderTrust, open_as_trainer
from deltawire.store import Bucket, open_bucket
from deltawire.sync import newest_readable, read_run
from deltawire.train.client.forward import vocabulary_of
from deltawire.train.client.operations import (
    Begin,
    EndTrainer,
    Opened,
    Operation,
    Result,
    StayAlive,
    decode_begin,
    decode_operation,
    encode,
)
from deltawire.train.client.session import LostState, TrainingSession
from deltawire.train.parallel.ranks import (
    broadcast,
    join_ranks,
    leave_ranks,
    lost_ranks,
    world_of,
)
from deltawire.wire.roles import Pin
from deltawire.wire.run import Run
from deltawire.wire.signing import Ed25519Signer

WAIT_S = 30.0
"""The other ranks hear from rank 0 at least this often."""
_LOG = logging.getLogger("deltawire.train.client")


class OpenSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a client opens its run; see `deltawire.train.TrainingClient.load`. ``key`` is a file.
    ``ranks`` is the number of ranks."""

    url: str
    ranks: int = 1
    lost_state: LostState = "refuse"
    take_over: bool = False
    key: str = ""
    public_key: str = ""

    def signer(self) -> Ed25519Signer | None:
        """Reads the owner's key; None for a run that is not signed."""
        return Ed25519Signer.read(Path(self.key)) if self.key else None

    def open_bucket(self) -> Bucket:
        """Opens the run's bucket as its trainer may use it."""
        trust = ReaderTrust(Pin.parse(self.public_key)) if self.public_key else ANY
        return open_as_trainer(open_bucket(self.url), self.signer(), trust)


def configured(bucket: Bucket, settings: OpenSettings) -> tuple[Run, RunConfig]:
    """Returns a run and its configuration with the client's number of ranks. Raises `InputError` if
    that does not divide into the configured axes."""
    run, config = open_run(bucket, role="trainer")
    if found := config.train.layout_contradiction(settings.ranks):
        raise InputError(f"train: {found[0]}", hint=found[1], run=bucket.url)
    train = msgspec.structs.replace(config.train, ranks=settings.ranks)
    return run, msgspec.structs.replace(config, train=train)


class LeadingTrainer:
    """The trainer in this process: rank 0, or the only one.

    Example::

        trainer = LeadingTrainer.open(OpenSettings(url="runs/mine/bucket"))
        answer = trainer.run(TakeStep(params=AdamParams()))
        trainer.close()
    """

    _led = False
    """True once this process has led other ranks: they end with their first client."""

    def __init__(
        self, session: TrainingSession, process: Process, stack: contextlib.ExitStack
    ) -> None:
        self.session, self.process = session, process
        mesh = session.masters.mesh
        self.opened = Opened(
            version=session.version,
            ranks=mesh.ranks,
            vocabulary=vocabulary_of(session.model),
            state_record=session.state_record,
            notice=session.notice,
        )
        self._mesh = mesh
        self._stack = stack
        self._ordered_at = time.monotonic()
        self._turn = threading.Lock()
        self._lost: BaseException | None = None
        self._closed = threading.Event()
        if session.notice:
            _LOG.warning("%s: %s", session.bucket.url, session.notice)

    @classmethod
    def open(cls, settings: OpenSettings) -> LeadingTrainer:
        """Takes the trainer's lease, and opens the run on all ranks."""
        rank, ranks = world_of()
        if rank or ranks != settings.ranks:
            raise BugError(f"rank {rank} of {ranks} cannot lead {settings.ranks} ranks")
        if cls._led and ranks > 1:
            raise InputError(
                "this script opened a training client over its ranks before; they ended with it",
                hint="open one client in a script that a launcher starts",
            )
        signer = settings.signer()
        bucket = settings.open_bucket()
        run, config = configured(bucket, settings)
        process = Process(bucket, "trainer", "trainer", supervised=False)
        if not settings.take_over:
            process.refuse_live_namesake()
        with contextlib.ExitStack() as stack:
            stack.enter_context(process.registered())
            head = newest_readable(process.bucket, run)
            if head is None:
                raise InputError("the run has no version 0", run=bucket.url)
            begin = Begin(
                run=run.id,
                public_key=run.public_key,
                version=head.version,
                epoch=next_epoch(process.bucket, run, head.version),
                session=secrets.token_hex(12),
            )
            cls._led = ranks > 1
            with lost_ranks():
                join_ranks()
                broadcast(encode(begin))
                session = TrainingSession.open(
                    process.bucket,
                    run,
                    config,
                    begin,
                    lost_state=settings.lost_state,
                    signer=signer,
                    confirm=process.lease.confirm,
                )
            stack.callback(session.close)
            return cls(session, process, stack.pop_all())

    def run(self, operation: Operation) -> Result:
        """Carries out an operation on all ranks. Over several ranks, an error that is no
        `InputError` ends the trainer: it is raised by every later call too."""
        with self._turn:
            if self._lost is not None:
                raise self._lost
            if self._mesh.ranks == 1:
                return self.session.carry_out(operation)
            try:
                with lost_ranks():
                    return self._order(operation)
            except _AllRefusedError as refused:
                raise refused.error from None
            except BaseException as error:
                self._lost = error
                raise

    def _order(self, operation: Operation) -> Result:
        self._ordered_at = time.monotonic()
        broadcast(encode(operation))
        with _agreed(self.session):
            return self.session.carry_out(operation)

    def keep_waiting(self) -> None:
        """Lets the other ranks know that this one is alive, if they have not heard for long."""
        if self._mesh.ranks > 1 and time.monotonic() - self._ordered_at >= WAIT_S / 2:
            self.run(StayAlive())

    def keep_alive(self) -> None:
        """Calls `keep_waiting` from a thread until `close`: for a caller that has another loop."""
        if self._mesh.ranks > 1:
            threading.Thread(target=self._keep_alive, name="ranks-alive", daemon=True).start()

    def _keep_alive(self) -> None:
        while not self._closed.wait(WAIT_S / 2):
            try:
                self.keep_waiting()
            except Exception:  # The next operation raises it.
                return

    @property
    def lost(self) -> bool:
        """Returns whether the trainer cannot carry out anything any more."""
        return self._lost is not None

    def close(self) -> None:
        """Ends all ranks, and releases the run. Changes that are not saved are dropped."""
        self._closed.set()
        with self._turn:
            try:
                if not self.lost and self._mesh.ranks > 1:
                    with lost_ranks():
                        broadcast(encode(EndTrainer()))
            finally:
                self._stack.close()
            if not self.lost:
                leave_ranks()


class _AllRefusedError(Exception):
    """All ranks refused an operation for the same reason."""

    def __init__(self, error: InputError) -> None:
        super().__init__(str(error))
        self.error = error


@contextlib.contextmanager
def _agreed(session: TrainingSession) -> Iterator[None]:
    """Finds out after an operation whether all ranks refused it, or none; raises `BugError` if they
    do not agree."""
    refused: InputError | None = None
    try:
        yield
    except InputError as error:
        refused = error
    mesh = session.masters.mesh
    count = int(mesh.sum([float(refused is not None)])[0])
    if count not in (0, mesh.ranks):
        raise BugError(
            f"{count} of {mesh.ranks} ranks refused an operation: {refused or 'not this one'}",
            hint="all ranks must have the same files, packages and settings",
        )
    if refused is not None:
        raise _AllRefusedError(refused)


def follow(settings: OpenSettings) -> None:
    """Carries out rank 0's operations on another rank, until it ends."""
    with lost_ranks():
        join_ranks()
        begin = decode_begin(broadcast())
        if begin.public_key:
            pinned = str(Pin(begin.public_key, begin.run))
            settings = msgspec.structs.replace(settings, public_key=pinned)
        bucket = settings.open_bucket()
        run = read_run(bucket, public_key=begin.public_key)
        if run.id != begin.run:
            raise InputError(
                f"rank {world_of()[0]} found the run {run.id[:16]}, rank 0 the run "
                f"{begin.run[:16]}",
                hint="give all ranks the same run",
                run=bucket.url,
            )
        _, config = configured(bucket, settings)
        session = TrainingSession.open(
            bucket, run, config, begin, lost_state=settings.lost_state, signer=settings.signer()
        )
        try:
            while not isinstance(operation := decode_operation(broadcast()), EndTrainer):
                with contextlib.suppress(_AllRefusedError), _agreed(session):
                    session.carry_out(operation)
        finally:
            session.close()
    leave_ranks()

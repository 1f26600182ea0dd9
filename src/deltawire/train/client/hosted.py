"""A training client's trainer in other processes of this machine, and the connection to it.

Concurrency::

    client's thread                         processes of `deltawire.train.client.host`
      run(operation): send ──────────────▶    rank 0 carries it out with the others
      wait ◀──────────────────── answer ──
      the connection ends ◀─── a rank died: the agent kills the others, and leaves the reason
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from deltawire.errors import BugError, InputError, ResyncError
from deltawire.runtime.supervisor import STOP_PATIENCE_S
from deltawire.train.client import host
from deltawire.train.client.operations import (
    Answer,
    Done,
    EndTrainer,
    Evaluation,
    Failed,
    Opened,
    Operation,
    Result,
    Saved,
    Stepped,
    decode_answer,
    encode,
)
from deltawire.train.client.ranks import OpenSettings

JOIN_S = 660.0
"""How long the trainer's processes may take to start: as long as ranks wait for each other."""
_FINAL = ("FencedError", "BugError")
"""Errors after which the run should not be opened again."""


class LostTrainerError(ResyncError):
    """The trainer's processes have ended: open the run again, from its last saved state."""


class HostedTrainer:
    """The trainer in processes that this one starts.

    Example::

        trainer = HostedTrainer.open(OpenSettings(url="runs/mine/bucket", ranks=2))
        answer = trainer.run(TakeStep(params=AdamParams()))
        trainer.close()
    """

    def __init__(self, settings: OpenSettings, folder: Path) -> None:
        self._settings, self._folder = settings, folder
        self._lost: Exception | None = None
        (folder / host.SETTINGS).write_bytes(msgspec.msgpack.encode(settings))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / host.SOCKET))
            listener.listen(1)
            # Ctrl-C in a terminal is for the caller, who then saves: not for these processes.
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter
                [*host.COMMAND, str(folder)], stdin=subprocess.DEVNULL, start_new_session=True
            )
            try:
                self._connection = self._accepted(listener)
                opened = self._answered(opening=True)
            except BaseException:
                self._end()
                raise
        if not isinstance(opened, Opened):
            self._end()
            raise BugError(f"the trainer answered {type(opened).__name__} when it started")
        self.opened = opened

    @classmethod
    def open(cls, settings: OpenSettings) -> HostedTrainer:
        """Starts the processes, and waits until they have opened the run.

        Raises what they raised, and `LostTrainerError` if they end without an error."""
        if not hasattr(socket, "AF_UNIX"):
            raise InputError(
                "this platform has no Unix sockets to reach a trainer in another process",
                hint="open the run with ranks=1, or start the script with torchrun",
            )
        return cls(settings, Path(tempfile.mkdtemp(prefix="deltawire-client-")))

    def run(self, operation: Operation) -> Result:
        """Carries out an operation. Raises its error, and `LostTrainerError` once the processes
        have ended."""
        if self._lost is not None:
            raise self._lost
        try:
            self._connection.send_bytes(encode(operation))
        except OSError:
            raise self._ended() from None
        answer = self._answered()
        if not isinstance(answer, Evaluation | Stepped | Saved | Done):
            raise BugError(f"the trainer answered {type(answer).__name__}")
        return answer

    def close(self) -> None:
        """Ends the processes, and releases the run. Changes that are not saved are dropped."""
        try:
            if self._lost is None:
                with contextlib.suppress(LostTrainerError, subprocess.TimeoutExpired):
                    self.run(EndTrainer())
                    self._process.wait(STOP_PATIENCE_S)
        finally:
            self._end()

    def _accepted(self, listener: socket.socket) -> Connection:
        """Waits for rank 0 to connect, as long as the processes run."""
        deadline = time.monotonic() + JOIN_S
        listener.settimeout(0.2)
        while True:
            try:
                connected, _ = listener.accept()
            except TimeoutError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise self._ended() from None
                continue
            connected.setblocking(True)
            return Connection(connected.detach())

    def _answered(self, *, opening: bool = False) -> Answer:
        try:
            answer = decode_answer(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise self._ended() from None
        if not isinstance(answer, Failed):
            return answer
        error = answer.error()
        if answer.ended:
            # Of the loss of another rank the agent knows the reason.
            known = answer.kind not in ("", "ResyncError") if opening else answer.kind in _FINAL
            self._lost = error if known else self._ended()
            raise self._lost
        raise error

    def _ended(self) -> Exception:
        """Returns why the processes have ended, once they have."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_PATIENCE_S)
        with contextlib.suppress(OSError):
            self._lost = self._lost_trainer((self._folder / host.FAILURE).read_text())
            return self._lost
        code = self._process.poll()
        if code is None:
            reason = "it does not answer"
        elif code < 0:
            reason = f"it was ended by signal {-code}"
        else:
            reason = f"it ended with exit code {code}"
        self._lost = self._lost_trainer(reason)
        return self._lost

    def _lost_trainer(self, reason: str) -> LostTrainerError:
        return LostTrainerError(
            f"the trainer of this client has ended: {reason}",
            hint='TrainingClient.load(url, lost_state="repeat") goes back to the last saved state; '
            "repeat the calls since then",
            run=self._settings.url,
        )

    def _end(self) -> None:
        """Ends the processes, if they still run, and removes the folder."""
        if hasattr(self, "_connection"):
            self._connection.close()
        if self._process.poll() is None:
            self._process.kill()  # Ranks do not outlive the agent that started them.
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

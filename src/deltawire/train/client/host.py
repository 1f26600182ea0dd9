"""Runs a training client's trainer in processes of its own: one, or several ranks.

::

    client ── Popen ──▶ this module ──┬──▶ the only rank
                                      └──▶ elastic agent ──▶ this module as rank 0, … rank N-1
    client ◀── socket in a private folder ──▶ rank 0

Started as ``python -m deltawire.train.client.host FOLDER``. All processes end when the client has
ended.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from deltawire.errors import DeltawireError, InputError
from deltawire.train.rank_agent import (
    RankError,
    die_with_parent,
    ending_at_once,
    is_follower,
    is_rank,
    run_ranks,
)

if TYPE_CHECKING:  # The agent computes nothing, and should start at once.
    from deltawire.train.client.operations import TrainerMessage
    from deltawire.train.client.ranks import OpenSettings

SETTINGS, SOCKET, FAILURE = "settings", "socket", "failure"
"""Names in the folder: how to open the run, the client's socket, and why the ranks ended."""
COMMAND = (sys.executable, "-P", "-m", "deltawire.train.client.host")


def main(folder: Path) -> int:
    """Runs the process that the client started, or one rank; returns its exit code."""
    data = (folder / SETTINGS).read_bytes()
    ranks = int(msgspec.msgpack.decode(data)["ranks"])
    if ranks > 1 and not is_rank():
        logging.disable(logging.ERROR)  # The client raises a rank's error: say it once.
        try:
            run_ranks([*COMMAND, str(folder)], ranks, supervised=True)
        except RankError as error:
            (folder / FAILURE).write_text(error.message)
            return error.exit_code
        return 0
    if not is_rank():
        die_with_parent(at_once=False)
    try:
        with ending_at_once(supervised=True):
            _run_rank(folder, data)
    except DeltawireError as error:  # The client was told.
        return error.exit_code
    return 0


def _run_rank(folder: Path, data: bytes) -> None:
    from deltawire.train.client.ranks import OpenSettings, follow

    settings = msgspec.msgpack.decode(data, type=OpenSettings)
    if is_follower():
        follow(settings)
        return
    with Client(str(folder / SOCKET)) as connection:
        lead(connection, settings)


def lead(connection: Connection, settings: OpenSettings) -> None:
    """Opens the run, and carries out the client's operations until it ends."""
    from deltawire.train.client.operations import Done, EndTrainer, Failed, decode_operation
    from deltawire.train.client.ranks import WAIT_S, LeadingTrainer

    with _told(connection):
        trainer = LeadingTrainer.open(settings)
    _send(connection, trainer.opened)
    try:
        while True:
            try:
                if not connection.poll(WAIT_S):
                    with _told(connection):
                        trainer.keep_waiting()
                    continue
                operation = decode_operation(connection.recv_bytes())
            except (EOFError, ConnectionError):
                return
            if isinstance(operation, EndTrainer):
                break
            try:
                answer: TrainerMessage = trainer.run(operation)
            except Exception as error:  # The client raises it.
                if trainer.lost:
                    _send(connection, Failed.of(error, ended=True))
                    raise
                answer = Failed.of(error)
            _send(connection, answer)
    finally:
        trainer.close()
    _send(connection, Done())


@contextlib.contextmanager
def _told(connection: Connection) -> Iterator[None]:
    """Tells the client of the error that ends this trainer."""
    try:
        yield
    except Exception as error:
        from deltawire.train.client.operations import Failed

        _send(connection, Failed.of(error, ended=True))
        raise


def _send(connection: Connection, message: TrainerMessage) -> None:
    """Sends an answer, unless the client has ended."""
    from deltawire.train.client.operations import encode

    with contextlib.suppress(OSError):
        connection.send_bytes(encode(message))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise InputError("this module is started by deltawire.train.TrainingClient")
    sys.exit(main(Path(sys.argv[1])))

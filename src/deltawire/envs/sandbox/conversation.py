"""Talks to a command in the sandbox line by line, such as a server of tools over stdin and stdout.

Lines are limited before they are kept: one that is too long is read to its end without being
stored, and a command that sends `FLOOD_TIMES` as much in one such line is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from deltawire.envs.sandbox.box import (
    CommandLimits,
    Files,
    Sandbox,
    check_files,
    require_started,
    start_launcher,
)
from deltawire.envs.sandbox.plan import MAX_HEADER_BYTES, Result, pack_request
from deltawire.errors import DeltawireError

FLOOD_TIMES = 16
LAST_CHARACTERS = 300
FAREWELL_S = 2.0
"""Seconds that a command may still take after its stdin was closed."""
LAST_WORDS_S = 30.0
"""Seconds for the launcher to tell how a command ended that has closed its stdout."""
_PIECE = 1 << 16


class CommandEndedError(Exception):
    """The command has ended; the message says how, with the last of what it wrote to stderr."""


class LineTooLongError(Exception):
    """A line was longer than allowed. It was left out; the next one can be read."""


class Lines:
    """Splits pieces into lines. A byte is copied once for each piece at most, also where a line
    comes in many pieces."""

    def __init__(self) -> None:
        self.waiting = bytearray()
        """The start of the next line."""

    def add(self, piece: bytes) -> list[bytes]:
        """Returns the lines that a piece ends, without their ends."""
        head, found, rest = piece.partition(b"\n")
        self.waiting += head
        if not found:
            return []
        *lines, last = rest.split(b"\n")
        lines.insert(0, bytes(self.waiting))
        self.waiting = bytearray(last)
        return lines


class Conversation:
    """A running command whose stdin and stdout are lines of this process.

    It sees ``files`` in ``/workspace``, the folder ``packages`` as one from which Python imports,
    and nothing else of this machine but its programs; it has no network. ``limits`` hold for all of
    its life. Exactly one task may use it at a time.

    Example::

        talk = await Conversation.open(Sandbox(), ["cat"], {}, limits=CommandLimits())
        await talk.write(b"hello")
        await talk.read(most=1024)   # b"hello"
        await talk.close()
    """

    def __init__(
        self, launcher: asyncio.subprocess.Process, ended: Callable[[], None] = lambda: None
    ) -> None:
        self._launcher = launcher
        self._release = ended
        self._split = Lines()
        self._lines: deque[bytes] = deque()
        self._dropped = 0

    @classmethod
    async def open(
        cls,
        sandbox: Sandbox,
        command: Sequence[str],
        files: Files,
        *,
        limits: CommandLimits,
        packages: Path | None = None,
        environment: Mapping[str, str] | None = None,
        wait_s: float | None = None,
    ) -> Conversation:
        """Starts a command. Raises `InputError` for files that do not fit the limits; a command
        that cannot be started is seen at the first `read`. While the sandbox runs as many
        commands as it may, waits at most ``wait_s`` seconds; then raises `TimeoutError`."""
        check_files(files, limits)
        given = dict(environment or {})
        shown: tuple[str, ...] = ()
        if packages is not None:
            shown = (str(packages.resolve()),)
            inside = f"/packages/{packages.resolve().name}"
            given["PYTHONPATH"] = inside if sandbox.isolation == "namespaces" else shown[0]
        request = replace(
            sandbox.request(tuple(command), limits, given), shown=shown, interactive=True
        )
        turns = sandbox.turns()
        async with asyncio.timeout(wait_s):
            await turns.acquire()
        try:
            launcher = await start_launcher()
        except BaseException:
            turns.release()
            raise
        talk = cls(launcher, turns.release)
        try:
            await talk.write(pack_request(request, files), end=b"")
        except BaseException:
            await talk.close()
            raise
        return talk

    async def write(self, line: bytes, *, end: bytes = b"\n") -> None:
        """Writes a line; waits while the command does not read. Raises `CommandEndedError`."""
        assert self._launcher.stdin is not None
        try:
            self._launcher.stdin.write(line + end)
            await self._launcher.stdin.drain()
        except (ConnectionError, RuntimeError) as error:
            raise await self._ended() from error

    async def read(self, *, most: int) -> bytes:
        """Reads a line of at most ``most`` bytes, without its end.

        Raises `LineTooLongError` for one that is longer, `CommandEndedError` at the end of the
        command, and `InputError` or `RetryError` if it never started.
        """
        assert self._launcher.stdout is not None
        while True:
            if self._lines:
                line = self._lines.popleft()
                dropped, self._dropped = self._dropped, 0
                if dropped or len(line) > most:
                    raise LineTooLongError(f"a line of more than {most} bytes")
                return line
            waiting = self._split.waiting
            if self._dropped + len(waiting) > most:
                self._dropped += len(waiting)
                waiting.clear()
            if self._dropped > FLOOD_TIMES * most:
                await self.close()
                raise CommandEndedError(
                    f"it was ended: it sent a line of more than {self._dropped} bytes"
                )
            piece = await self._launcher.stdout.read(_PIECE)
            if not piece:
                raise await self._ended()
            self._lines.extend(self._split.add(piece))
            await asyncio.sleep(0)  # A command that never stops writing must not stop the others.

    async def _ended(self) -> CommandEndedError:
        """Describes the end; raises `InputError` or `RetryError` if it never started."""
        assert self._launcher.stderr is not None
        told = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                while len(told) < MAX_HEADER_BYTES and (
                    piece := await self._launcher.stderr.read(_PIECE)
                ):
                    told += piece
        result, said = _result(told)
        require_started(result)
        how = f"exceeded its limit of {result.cause}" if result.cause else f"exit {result.status}"
        last = said.decode(errors="replace").strip()[-LAST_CHARACTERS:]
        return CommandEndedError(f"it ended ({how}){f', its last words: {last}' if last else ''}")

    async def close(self) -> None:
        """Ends the command and everything that it started."""
        launcher = self._launcher
        try:
            with contextlib.suppress(ProcessLookupError):
                launcher.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FAREWELL_S):
                    await launcher.wait()
        finally:
            # Kills the launcher if it is still there, and closes pipes that nobody will read.
            launcher._transport.close()  # type: ignore[attr-defined]
            release, self._release = self._release, lambda: None
            release()
        await launcher.wait()


def _result(told: bytes) -> tuple[Result, bytes]:
    """The launcher's last frame: the result, and the last of the command's stderr."""
    length = int.from_bytes(told[:8], "little")
    try:
        header = msgspec.json.decode(told[8 : 8 + length])
        return Result(**header["result"]), told[8 + length :]
    except (msgspec.DecodeError, KeyError, TypeError, DeltawireError):
        return Result(status=-9), told

"""Scores answers by a function in a child process, which is killed when it takes too long.

Scoring a model's answer may take forever or take all memory. So the function runs in a separate
process, with limits on time and memory, with few of this one's environment variables, and with its
output discarded. This is no isolation: code in an answer must not run here
(`deltawire.envs.evaluated_answers`). Concurrency::

    score(…) ─▶ a thread, one at a time ─▶ child: function(…) ─▶ a number
                        └─ killed after limit_s; the next call starts another child

The child also sets itself an alarm, so that it ends if its parent is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import importlib
import json
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO

START_S = 120.0
"""How long the child may take to import the function, in seconds."""

_KEPT = ("PATH", "PYTHONHASHSEED", "LANG", "LC_ALL", "TMPDIR", "SYSTEMROOT")
_HEADER = struct.Struct("<Q")
_MAX_ANSWER = 4096
_GRACE_S = 5.0


class ScoringTimeoutError(Exception):
    """The function did not return in time."""


class ScoringError(Exception):
    """The function raised, or its process died."""


class ScoringProcess:
    """Calls ``module:function`` in a child process with arguments that JSON can hold; it must
    return a number. Calls are made one at a time.

    Example::

        score = ScoringProcess("my_module:score", limit_s=10.0)
        reward = await score("the answer")
    """

    def __init__(self, function: str, *, limit_s: float = 10.0, memory_bytes: int = 4 << 30):
        self._function = function
        self._limit_s = limit_s
        self._memory_bytes = memory_bytes
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    async def __call__(self, *arguments: Any, limit_s: float | None = None) -> float:
        """Calls the function, under another limit if one is given. Raises `ScoringTimeoutError` or
        `ScoringError`; later calls start a new child if necessary."""
        return await asyncio.to_thread(self.call, *arguments, limit_s=limit_s)

    def call(self, *arguments: Any, limit_s: float | None = None) -> float:
        """Calls the function, blocking this thread."""
        with self._lock:
            try:
                return self._ask(arguments, limit_s or self._limit_s)
            except BaseException as error:
                if not isinstance(error, _RaisedError):
                    self._kill()
                if isinstance(error, BrokenPipeError | EOFError):
                    raise ScoringError("the scoring process died") from error
                raise

    def start(self) -> None:
        """Starts the child and imports the function, if that is not done; raises `ScoringError`,
        `ScoringTimeoutError` or `EOFError`."""
        with self._lock:
            if self._child is None:
                try:
                    self._start()
                except BaseException:
                    self._kill()
                    raise

    def close(self) -> None:
        """Ends the child."""
        with self._lock:
            self._kill()

    def _ask(self, arguments: tuple[Any, ...], limit_s: float) -> float:
        child = self._child or self._start()
        assert child.stdin is not None
        request = {"arguments": arguments, "alarm_s": limit_s + _GRACE_S}
        data = json.dumps(request).encode()
        child.stdin.write(_HEADER.pack(len(data)) + data)
        child.stdin.flush()
        answer = self._read(child, limit_s)
        if "error" in answer:
            raise _RaisedError(str(answer["error"]))
        return float(answer["value"])

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        # Run as a file, so that the child imports only what the function needs; and in an empty
        # context, since it serves all episodes and must not end with the one that started it.
        self._child = contextvars.Context().run(
            subprocess.Popen,
            [sys.executable, "-P", __file__, self._function, str(self._memory_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        answer = self._read(self._child, START_S)
        if "error" in answer:
            raise ScoringError(f"cannot score with {self._function}: {answer['error']}")
        return self._child

    def _read(self, child: subprocess.Popen[bytes], seconds: float) -> dict[str, Any]:
        assert child.stdout is not None
        deadline = time.monotonic() + seconds
        line = b""
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([child.stdout], [], [], left)[0]:
                raise ScoringTimeoutError(f"scoring took longer than {seconds:g} s")
            piece = os.read(child.stdout.fileno(), _MAX_ANSWER)
            if not piece or len(line) > _MAX_ANSWER:
                raise EOFError
            line += piece
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _kill(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        child.wait()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._kill()


class _RaisedError(ScoringError):
    """The function raised, and its process is still usable."""


def _limit_memory(count: int) -> None:
    with contextlib.suppress(
        ImportError, ValueError, OSError
    ):  # Not every system has these limits.
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (count, count))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _answer(out: BinaryIO, **content: Any) -> None:
    out.write(json.dumps(content).encode() + b"\n")
    out.flush()


def _serve(function: str, memory_bytes: int) -> None:
    """Answers requests in the child until there are no more."""
    out = os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # The function's own output is not an answer.
    try:
        module, _, name = function.partition(":")
        call = getattr(importlib.import_module(module), name)
        _limit_memory(memory_bytes)
    except Exception as error:  # An import may raise anything.
        _answer(out, error=f"{type(error).__name__}: {error}"[:1000])
        return
    _answer(out, value=0)
    while header := sys.stdin.buffer.read(_HEADER.size):
        request = json.loads(sys.stdin.buffer.read(*_HEADER.unpack(header)))
        signal.setitimer(
            signal.ITIMER_REAL, request["alarm_s"]
        )  # The signal's default action ends the process.
        try:
            answer: dict[str, Any] = {"value": float(call(*request["arguments"]))}
        except Exception as error:  # whatever the function raises
            answer = {"error": f"{type(error).__name__}: {error}"[:1000]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        _answer(out, **answer)


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))

"""Renders chat templates of others in a process with limits on memory, time and output.

The template of a model that came from a bucket is code of every writer to it. Jinja's sandbox keeps
it from the interpreter, but `9**(9**9)` or a string of gigabytes is one call into C, which nothing
in this process can end. So it is rendered in a child process, by the library's own function::

    render(…) ─▶ one at a time ─▶ child: apply_chat_template(…) ─▶ text
                       └─ killed beyond a limit; the next rendering starts another child

Requests and answers are JSON with a length before it. The child has few of this process's
environment variables, writes no file, and ends when its standard input does.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from deltawire.errors import InputError

START_S = 120.0
"""How long the child may take to import the library, in seconds."""
MEMORY_BYTES = 512 << 20
"""The memory that a rendering may take on top of the library."""
MAX_BYTES = 64 << 20
"""The most that a request or a rendered text may hold, in UTF-8."""

_KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "LC_TIME", "TZ", "TMPDIR", "SYSTEMROOT")
_SET = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_HEADER = struct.Struct("<Q")
_ANSWER_BYTES = 6 * MAX_BYTES + (64 << 10)  # JSON spells some characters with six
_TOO_LONG = f"writes more than {MAX_BYTES >> 20} MiB"


class TemplateError(Exception):
    """The template raised, as `apply_chat_template` raises in this process."""


class TemplateProcess:
    """Renders conversations in a child process; ``name`` says in errors whose template it is.

    The child starts with the first rendering. Renderings are made one at a time.

    Example::

        process = TemplateProcess("s3://bucket/run")
        text = process.render(template, [{"role": "user", "content": "hi"}], {}, within_s=5.0)
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._end: Any = None

    def render(
        self,
        template: str,
        rows: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
        *,
        within_s: float,
    ) -> str:
        """Returns the text of ``apply_chat_template(rows, chat_template=template, **arguments)`` of
        a tokenizer without special tokens.

        Raises `InputError` beyond a limit, and otherwise `TemplateError`, or `TypeError` if the
        template raises one.
        """
        request = {"template": template, "rows": rows, "arguments": arguments, "within": within_s}
        data = _packed(request)
        if len(data) > MAX_BYTES:
            raise self._beyond(f"is given more than {MAX_BYTES >> 20} MiB of messages")
        with self._lock:
            try:
                child = self._child or self._start()
                answer = self._ask(child, data, within_s)
            except BaseException:
                self._kill()
                raise
            if answer.get("out_of_memory"):
                self._kill()  # what is left of the memory is no measure for the next rendering
                raise self._beyond(f"takes more than {MEMORY_BYTES >> 20} MiB")
        if answer.get("too_long"):
            raise self._beyond(_TOO_LONG)
        if "error" in answer:
            kind = TypeError if answer.get("type_error") else TemplateError
            raise kind(str(answer["error"]))
        return str(answer.get("text", ""))

    def close(self) -> None:
        """Ends the child."""
        with self._lock:
            self._kill()

    def _beyond(self, what: str) -> InputError:
        return InputError(
            f"the chat template of {self._name} {what}",
            hint="use a model whose template stays within the limits of docs/THREATS.md",
        )

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        # In an empty context: it serves all episodes and must not end with the one that started it.
        self._child = child = contextvars.Context().run(
            subprocess.Popen,
            [sys.executable, "-P", "-m", "deltawire.chat.template_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**environment, **_SET},
            start_new_session=True,
        )
        self._end = weakref.finalize(self, _kill, child)
        assert child.stdin is not None
        os.set_blocking(child.stdin.fileno(), False)
        answer = self._read(child, time.monotonic() + START_S, START_S)
        if "error" in answer:
            raise InputError(f"cannot start the process of chat templates: {answer['error']}")
        return child

    def _ask(self, child: subprocess.Popen[bytes], data: bytes, within_s: float) -> dict[str, Any]:
        assert child.stdin is not None
        deadline = time.monotonic() + within_s
        left = memoryview(data)
        while left:
            self._await(child.stdin.fileno(), select.POLLOUT, deadline, within_s)
            try:
                left = left[os.write(child.stdin.fileno(), left) :]
            except BrokenPipeError:
                raise self._died(child) from None
        return self._read(child, deadline, within_s)

    def _read(
        self, child: subprocess.Popen[bytes], deadline: float, limit_s: float
    ) -> dict[str, Any]:
        assert child.stdout is not None
        found, wanted = bytearray(), _HEADER.size
        while len(found) < wanted:
            self._await(child.stdout.fileno(), select.POLLIN, deadline, limit_s)
            piece = os.read(child.stdout.fileno(), min(wanted - len(found), 1 << 20))
            if not piece:
                raise self._died(child)
            found += piece
            if wanted == _HEADER.size == len(found):
                (size,) = _HEADER.unpack(found)
                if size > _ANSWER_BYTES:
                    raise self._beyond(_TOO_LONG)
                wanted += size
        try:
            answer = json.loads(bytes(found[_HEADER.size :]).decode("utf-8", "surrogatepass"))
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise self._died(child)
        return answer

    def _await(self, descriptor: int, event: int, deadline: float, limit_s: float) -> None:
        ready = select.poll()
        ready.register(descriptor, event)
        if not ready.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise self._beyond(f"takes more than {limit_s:g} s")

    def _died(self, child: subprocess.Popen[bytes]) -> InputError:
        _kill(child)
        return self._beyond(f"ended the process that renders it (status {child.returncode})")

    def _kill(self) -> None:
        self._child = None
        if self._end is not None:
            self._end()


def _kill(child: subprocess.Popen[bytes]) -> None:
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _packed(content: Any) -> bytes:
    """Returns JSON with its length before it. Surrogates stay as they are; what JSON cannot hold is
    the placeholder that transformers puts in its place."""
    text = json.dumps(
        content, ensure_ascii=False, default=lambda value: f"<{type(value).__name__}>"
    )
    data = text.encode("utf-8", "surrogatepass")
    return _HEADER.pack(len(data)) + data


def _limit(within_s: float | None = None) -> None:
    """Bounds this process: its memory and files, and with ``within_s`` its next CPU seconds."""
    with contextlib.suppress(ImportError):  # not every system has these limits
        import resource

        if within_s is not None:
            cpu_s = int(time.process_time() + within_s) + 2
            resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, resource.RLIM_INFINITY))
            return
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        with contextlib.suppress(OSError, ValueError):
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            taken = pages * resource.getpagesize()
            most = taken + MEMORY_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _answer(out: BinaryIO, **content: Any) -> None:
    out.write(_packed(content))
    out.flush()


def _rendered(apply: Any, request: dict[str, Any]) -> dict[str, Any]:
    try:
        text = apply(
            request["rows"],
            chat_template=request["template"],
            tokenize=False,
            **request["arguments"],
        )
        if len(text) > MAX_BYTES or len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
            return {"too_long": True}
        return {"text": text}
    except MemoryError:
        return {"out_of_memory": True}
    except Exception as error:  # templates raise through jinja2 whatever they like
        return {"error": str(error)[:1000], "type_error": isinstance(error, TypeError)}


def _serve() -> None:
    """Answers requests in the child until there are no more."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # The library's own output is not an answer.
    try:
        from transformers.tokenization_utils_base import PreTrainedTokenizerBase

        class Template(PreTrainedTokenizerBase):
            """`apply_chat_template` without a vocabulary."""

            special_tokens_map: ClassVar[dict[str, Any]] = {}  # the request's arguments hold them

            def __init__(self) -> None:
                self.chat_template = None

        apply = Template().apply_chat_template
        apply([{"role": "user", "content": ""}], chat_template="-", tokenize=False)  # imports all
        _limit()
    except Exception as error:  # An import may raise anything.
        _answer(out, error=f"{type(error).__name__}: {error}"[:1000])
        return
    _answer(out, started=True)
    while header := sys.stdin.buffer.read(_HEADER.size):
        data = sys.stdin.buffer.read(*_HEADER.unpack(header))
        request = json.loads(data.decode("utf-8", "surrogatepass"))
        _limit(request["within"])
        try:
            _answer(out, **_rendered(apply, request))
        except MemoryError:
            _answer(out, out_of_memory=True)


if __name__ == "__main__":
    _serve()

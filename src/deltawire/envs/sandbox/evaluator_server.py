"""Evaluates expressions in a sandbox: one warmed process, and a fresh fork of it for each text.

::

    scorer ══ stdin ══▶ launcher ── fork ──▶ first process ── fork ──▶ evaluates one text
      ▲   a request       waits             of the namespace;             │
      └═══ stdout ◀═════════════════════ a reply ◀──── data, then it is killed

The first process imports the library once, inside namespaces in which nothing can be written and
no network exists. Each fork has the kernel's limits and a filter of system calls, holds no
descriptor but the pipe for its result, and ends with everything that it started before the next
one begins. So no text can change how a later one is evaluated.

Evaluated texts are untrusted, and so is what a fork writes. A reply is data that the caller parses
and judges; no verdict is made here. This module runs in the launcher's bare interpreter and
imports the standard library only.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import sys
import time
from typing import Any

from deltawire.envs.sandbox import namespaces, seccomp
from deltawire.envs.sandbox.plan import read_exactly, read_header, request_of

MAX_REPLY = 1 << 18
MAX_TEXT = 1 << 16
MAX_NODES = 4096


def main() -> None:
    """Serves requests from stdin until it closes."""
    header = read_header(read_exactly)
    request = request_of(header)
    try:
        namespaces.enter(user_namespace=request.user_namespace)
        writable = namespaces.build(request)
    except (namespaces.UnsupportedError, OSError) as error:
        _reply({"unsupported": str(error)})
        return
    first = os.fork()
    if first == 0:
        try:
            namespaces.first_process(request, writable)
            os.chdir("/")
            _serve(header)
        except BaseException as error:
            _reply({"unsupported": f"{type(error).__name__}: {error}"})
        os._exit(0)
    os.close(0)  # The first process reads the requests, and sees when there are no more.
    os.waitpid(first, 0)


def _serve(header: dict[str, Any]) -> None:
    request = request_of(header)
    # The first process of a namespace gets only signals from within it that it handles: none.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.path += header["path"]
    sys.setrecursionlimit(2000)
    import sympy.parsing.sympy_parser  # noqa: F401

    _evaluate("expression", "x*2 + sin(3)", ["x"])  # fills the library's caches
    seccomp.program()
    gc.collect()
    gc.freeze()  # A fork that collects garbage would copy every page of the library.
    gc.disable()
    _reply({"ready": True})
    while True:
        try:
            asked = json.loads(read_exactly(int.from_bytes(read_exactly(8), "little")))
        except EOFError:
            return
        _reply(_fork(request, asked))


def _reply(content: dict[str, Any]) -> None:
    data = json.dumps(content).encode()
    data = len(data).to_bytes(8, "little") + data
    while data:
        data = data[os.write(1, data) :]


def _fork(request: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """Evaluates one text in a fork; its bytes as they are, or that there are none."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _become_child(request, writing)
            result = json.dumps(_evaluate(asked["kind"], asked["text"], asked["names"]))
        except BaseException as error:
            result = json.dumps({"error": type(error).__name__})
        with contextlib.suppress(BaseException):
            _write_all(writing, result.encode())
        os._exit(0)
    os.close(writing)
    data = _read_until(reading, time.monotonic() + request.limits.wall_s)
    os.close(reading)
    # As the first process of its namespace, this ends everything in it but itself.
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    return {"data": data.decode("ascii", "replace")}


def _become_child(request: Any, writing: int) -> None:
    null = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    os.closerange(3, writing)
    os.closerange(writing + 1, 256)
    namespaces.limit_command(request.limits, filtered=True, niceness=0)


def _write_all(handle: int, data: bytes) -> None:
    while data:
        data = data[os.write(handle, data) :]


def _read_until(handle: int, deadline: float) -> bytes:
    found = b""
    while len(found) <= MAX_REPLY:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([handle], [], [], left)[0]:
            return b""
        piece = os.read(handle, 1 << 16)
        if not piece:
            return found
        found += piece
    return b""


def _evaluate(kind: str, text: str, names: list[str]) -> dict[str, Any]:
    """Evaluates an untrusted text; runs in a fork only."""
    if kind == "literal":
        return {"value": eval(text)}  # noqa: S307  -- in a sandbox, in a separate process
    import sympy

    expression = sympy.parse_expr(text, local_dict={name: sympy.Symbol(name) for name in names})
    count = [0]
    return {"tree": _tree(expression, count)}


def _tree(node: Any, count: list[int]) -> list[Any]:
    """A sympy expression as nested lists: the class's name, and its arguments."""
    count[0] += 1
    if count[0] > MAX_NODES:
        raise ValueError("too large")
    name = type(node).__name__
    if getattr(node, "is_Integer", False):
        return ["Integer", str(int(node))]
    if getattr(node, "is_Rational", False):
        return ["Rational", str(node.p), str(node.q)]
    if getattr(node, "is_Float", False):
        return ["Float", str(node)]
    if getattr(node, "is_Symbol", False):
        return ["Symbol", node.name]
    return [name, *(_tree(argument, count) for argument in node.args)]


if __name__ == "__main__":
    main()

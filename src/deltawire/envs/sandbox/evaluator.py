"""`Evaluator`: evaluates untrusted expressions in a sandbox and returns them as data.

The value of an expression comes back as numbers, texts and lists, or as a tree of the names in
`NODES`, and is built again here. Code of an expression can choose the value that it returns, as it
could by being another expression; it cannot choose what the value is compared with, nor how.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from deltawire.envs.sandbox.box import Sandbox
from deltawire.envs.sandbox.evaluator_server import MAX_REPLY, MAX_TEXT
from deltawire.envs.sandbox.plan import PACKAGES, CommandLimits, pack
from deltawire.errors import InputError

START_S = 60.0
LIMITS = CommandLimits(
    wall_s=5.0,
    cpu_s=5.0,
    memory_bytes=1 << 30,
    processes=1,
    open_files=16,
    disk_bytes=1 << 20,
    files=16,
)
MAX_DEPTH = 100
MAX_DIGITS = 1000
MAX_EXPONENT = 10_000
_ELEMENTARY = "Add Mul Pow exp log sqrt Abs sign floor ceiling erf"
_TRIGONOMETRIC = "sin cos tan cot sec csc asin acos atan sinh cosh tanh asinh acosh atanh"
_CONSTANTS = "Pi Exp1 ImaginaryUnit NaN Infinity NegativeInfinity ComplexInfinity"
NODES = frozenset(f"{_ELEMENTARY} {_TRIGONOMETRIC} {_CONSTANTS}".split())
"""Classes of sympy that a value may consist of, next to numbers and symbols."""
_BOOT = (
    "import sys; sys.path.append({!r}); "
    "from deltawire.envs.sandbox.evaluator_server import main; main()"
)


class EvaluationError(ValueError):
    """The text has no value that may be used: it failed, took too long, or returned no data."""


class Evaluator:
    """A sandbox with a warmed process that evaluates one text at a time, each in a fresh fork.

    Raises `InputError` from the first call if this machine cannot isolate it.

    Example::

        with Evaluator() as evaluator:
            evaluator.expression("3*(4 + 2)")      # sympy's Integer(18)
            evaluator.literal("[[1, 2], [3, 4]]")  # a list
    """

    def __init__(self, limits: CommandLimits = LIMITS) -> None:
        self._limits = limits
        self._server: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the sandbox."""
        server, self._server = self._server, None
        if server is not None:
            server.kill()
            for pipe in (server.stdin, server.stdout):
                if pipe is not None:
                    pipe.close()
            server.wait()

    def literal(self, text: str) -> Any:
        """The value of a Python expression, if it is made of numbers, texts and lists. Raises
        `EvaluationError`."""
        return self._ask("literal", text, ()).get("value")

    def expression(self, text: str, names: Iterable[str] = ()) -> Any:
        """A sympy expression with the symbols ``names``. Raises `EvaluationError`."""
        tree = self._ask("expression", text, names).get("tree")
        try:
            return _build(tree, 0)
        except EvaluationError:
            raise
        except Exception as error:  # sympy raises whatever it likes about odd arguments
            raise EvaluationError(f"not an expression: {error}") from error

    def _ask(self, kind: str, text: str, names: Iterable[str]) -> dict[str, Any]:
        if len(text) > MAX_TEXT:
            raise EvaluationError(f"a text of {len(text)} characters; at most {MAX_TEXT}")
        server = self._server or self._start()
        assert server.stdin is not None
        request = json.dumps({"kind": kind, "text": text, "names": list(names)}).encode()
        try:
            server.stdin.write(len(request).to_bytes(8, "little") + request)
            server.stdin.flush()
            answer = _read(server, self._limits.wall_s + 10)
        except (OSError, EOFError, TimeoutError) as error:
            self.close()
            raise EvaluationError("the sandbox ended") from error
        try:
            found = json.loads(answer["data"])
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            raise EvaluationError("no value") from error
        if not isinstance(found, dict) or "error" in found:
            raise EvaluationError("no value")
        return found

    def _start(self) -> subprocess.Popen[bytes]:
        paths = _library_paths()
        request = replace(
            Sandbox().request((), self._limits, {}), read_only=True, shown=tuple(paths)
        )
        source = str(Path(__file__).resolve().parents[3])
        server = subprocess.Popen(  # noqa: S603  -- this interpreter, and no input
            [sys.executable, "-I", "-S", "-B", "-c", _BOOT.format(source)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
            start_new_session=True,
        )
        self._server = server
        assert server.stdin is not None
        try:
            server.stdin.write(pack({"request": asdict(request), "path": [PACKAGES]}, []))
            server.stdin.flush()
            answer = _read(server, START_S)
        except (OSError, EOFError, TimeoutError) as error:
            self.close()
            raise InputError(f"the sandbox for scoring did not start: {error!r}") from error
        if "ready" not in answer:
            self.close()
            raise InputError(
                f"this machine gives no sandbox: {answer.get('unsupported')}",
                hint="allow user namespaces (or run as root) to score answers that are evaluated",
            )
        return server


def _library_paths() -> list[str]:
    """The folders of sympy and mpmath, and nothing else of where packages are installed."""
    from importlib.util import find_spec

    found = []
    for name in ("sympy", "mpmath"):
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            raise InputError(f"the package {name} is not installed")
        found.append(str(Path(spec.origin).resolve().parent))
    return found


def _read(server: subprocess.Popen[bytes], seconds: float) -> dict[str, Any]:
    assert server.stdout is not None
    deadline, handle = time.monotonic() + seconds, server.stdout.fileno()

    def exactly(count: int) -> bytes:
        data = b""
        while len(data) < count:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([handle], [], [], left)[0]:
                raise TimeoutError
            piece = os.read(handle, count - len(data))
            if not piece:
                raise EOFError
            data += piece
        return data

    length = int.from_bytes(exactly(8), "little")
    if length > 8 * MAX_REPLY:
        raise EOFError
    answer = json.loads(exactly(length))
    return answer if isinstance(answer, dict) else {}


def _build(tree: Any, depth: int) -> Any:
    """A sympy expression from untrusted nested lists."""
    import sympy

    if not isinstance(tree, list) or not tree or depth > MAX_DEPTH:
        raise EvaluationError("not a tree of known nodes")
    name, *arguments = tree
    if name in ("Integer", "Rational", "Float"):
        if not all(isinstance(a, str) and len(a) <= MAX_DIGITS for a in arguments):
            raise EvaluationError("not a number")
        if name == "Float":
            return sympy.Float(arguments[0])
        return getattr(sympy, name)(*map(int, arguments))
    if name == "Symbol":
        if not (isinstance(arguments[0], str) and arguments[0].isidentifier()):
            raise EvaluationError("not a symbol")
        return sympy.Symbol(arguments[0][:64])
    if name not in NODES:
        raise EvaluationError("not a tree of known nodes")
    built = [_build(argument, depth + 1) for argument in arguments]
    if name == "Pow" and built[1].is_number and not abs(built[1]) <= MAX_EXPONENT:
        raise EvaluationError("too large an exponent")
    constants = {"Pi": sympy.pi, "Exp1": sympy.E, "ImaginaryUnit": sympy.I, "NaN": sympy.nan,
                 "Infinity": sympy.oo, "NegativeInfinity": -sympy.oo,
                 "ComplexInfinity": sympy.zoo}  # fmt: skip
    return constants[name] if name in constants else getattr(sympy, name)(*built)

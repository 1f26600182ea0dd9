"""Two builds of deltawire: copies of the package, the second with the next release's number and
features.

    python tests/support/two_builds.py COPY status RUN_URL

runs a command of the copy in the folder COPY; its child processes do too. A process imports torch
and the rest in some ten seconds of a core, so a `ForkServer` imports them once for a build and
forks its commands from there::

    test                              python tests/support/two_builds.py COPY --fork-server
      start ────── a line of JSON ───▶  forks, and runs the command in the child
      pid, code ◀─ a line of JSON ────  reaps children; ends them all when its input ends
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve()
NEXT = "0.2.0"
EDITS = {
    "__init__.py": [('__version__ = "0.1.0"', f'__version__ = "{NEXT}"')],
    "config/features.py": [
        (
            "FEATURES: Final[dict[str, Feature]] = {}",
            'FEATURES: Final[dict[str, Feature]] = {"rollout.tempo": Feature("0.2", ("worker",))}',
        )
    ],
    "config/sections.py": [
        (
            "class RolloutConfig(Section, frozen=True, kw_only=True):",
            "class RolloutConfig(Section, frozen=True, kw_only=True):\n    tempo: Count = 1",
        )
    ],
    "wire/status.py": [
        (
            "    ended: bool = False\n",
            '    ended: bool = False\n    mood: str = "newer"\n',
        )
    ],
}
"""The next release has a number, a setting that workers must know, and a member of heartbeats that
this release does not know."""


GROUP_S = 0.7
"""Workers of a `ForkServer` store a group at most so often, so that a run leaves processors to the
processes that start: two workers without this pause keep two cores busy."""

PRELOADED = (
    "deltawire.launch.gateway",
    "deltawire.launch.processes",
    "deltawire.launch.pull",
    "deltawire.launch.relay",
    "deltawire.live.gateway.app",
    "deltawire.live.gateway.embedded_replica",
    "deltawire.rl.evaluate.evaluator",
    "deltawire.rl.rollout.worker",
    "deltawire.rl.trainer.trainer",
)


def make_build(folder: Path, *, edited: bool) -> Path:
    """Copies the package that is imported here, and makes the copy the next release if it is to be
    ``edited``; returns its folder."""
    import deltawire
    from deltawire import _native

    source = Path(deltawire.__file__).parent
    copy = folder / "deltawire"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    native = Path(_native.__file__)
    shutil.copy(native, copy / native.name)
    for name, edits in EDITS.items() if edited else ():
        text = (copy / name).read_text()
        for old, new in edits:
            if old not in text:
                raise ValueError(f"{name} has no {old!r}: change EDITS with it")
            text = text.replace(old, new, 1)
        (copy / name).write_text(text)
    return folder


def command_of(build: Path) -> list[str]:
    """The first words of a command of the build in a folder."""
    return [sys.executable, str(SCRIPT), str(build)]


class Forked:
    """A process that a `ForkServer` started, with the methods of `subprocess.Popen`."""

    def __init__(self) -> None:
        self.pid = 0
        self._code: int | None = None
        self._begun, self._ended = threading.Event(), threading.Event()

    def tell(self, answer: dict[str, int]) -> None:
        """Takes a line of the server."""
        if "pid" in answer:
            self.pid = answer["pid"]
            self._begun.set()
        else:
            self._code = answer["code"]
            self._ended.set()

    def begun(self, timeout: float) -> None:
        """Waits until the process is there."""
        if not self._begun.wait(timeout):
            raise TimeoutError("the fork server did not start a process")

    def poll(self) -> int | None:
        return self._code

    def wait(self, timeout: float) -> int | None:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("a forked command", timeout)
        return self._code

    def send_signal(self, number: signal.Signals) -> None:
        if self._code is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """Starts commands of one build without importing it again.

    Example::

        with ForkServer(build) as server:
            server.start(["status", url], log=folder / "log", cwd=folder, env={}).wait(60)
    """

    def __init__(self, build: Path) -> None:
        self._started: list[Forked] = []
        self._process = subprocess.Popen(
            [*command_of(build), "--fork-server"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._listener.join(60)

    def start(
        self, arguments: list[str], *, log: Path, cwd: Path, env: dict[str, str], within_s: float
    ) -> Forked:
        """Runs a command, whose output is added to ``log``."""
        assert self._process.stdin is not None
        started = Forked()
        self._started.append(started)
        asked = {"arguments": arguments, "log": str(log), "cwd": str(cwd), "env": env}
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        self._process.stdin.flush()
        started.begun(within_s)
        return started

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as answers:
            for line in answers:
                answer = json.loads(line)
                self._started[answer.pop("number")].tell(answer)


def _serve_forks() -> dict[str, Any] | None:
    """Forks for each line of standard input; returns the command in the child, None at the end."""
    for name in PRELOADED:
        importlib.import_module(name)
    _pace_workers()
    running: dict[int, int] = {}
    count = 0
    try:
        while True:
            readable, _, _ = select.select([0], [], [], 0.05)
            # One line a request: the test waits for each answer.
            line = os.read(0, 1 << 16) if readable else b"\n"
            if not line:
                return None
            if line.strip():
                pid = os.fork()
                if not pid:
                    running.clear()
                    return json.loads(line)
                running[pid] = count
                _say(number=count, pid=pid)
                count += 1
            for pid, number in list(running.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    del running[pid]
                    _say(number=number, code=os.waitstatus_to_exitcode(status))
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _pace_workers() -> None:
    from deltawire.rl.rollout.uploader import Uploader

    store = Uploader._store

    def store_slowly(self: Any, *group: Any) -> None:
        time.sleep(GROUP_S)
        store(self, *group)

    Uploader._store = store_slowly  # type: ignore[method-assign]


def _say(**answer: int) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _become(asked: dict[str, Any]) -> None:
    """Makes this process that of a command, as `subprocess.Popen` does."""
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(log)
    os.close(null)
    sys.argv = ["deltawire", *asked["arguments"]]


def main() -> None:
    """Runs the command of the copy, or serves forks of it."""
    # An editable installation finds the checkout before any path.
    sys.meta_path[:] = [one for one in sys.meta_path if "Redirecting" not in type(one).__name__]
    folder = sys.argv[1]
    sys.path[0:1] = [folder, folder]  # `deltawire.__main__` removes the first.
    os.environ["PYTHONPATH"] = folder
    sys.argv = ["deltawire", *sys.argv[2:]]
    if sys.argv[1:] == ["--fork-server"]:
        asked = _serve_forks()
        if asked is None:
            return
        _become(asked)
    runpy.run_module("deltawire", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
